"""The fixtures of tests/planning."""

from tests.planning.conftest import model

__all__ = ["model"]
