"""Trackers, one a file: where metrics go beside metrics.jsonl."""
