"""Scoring samples with other models, each an engine behind a ZeroMQ server, and the client of these servers."""
