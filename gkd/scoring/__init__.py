"""Scoring samples with the teacher: an engine behind a ZeroMQ server, and the client that asks it."""
