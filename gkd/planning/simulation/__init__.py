"""Seconds of a step: what each stage takes, and who waits for whom, event by event."""
