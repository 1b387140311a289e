"""Servers and clients as in tests/scoring."""

from tests.scoring.conftest import connect, serve

__all__ = ["connect", "serve"]
