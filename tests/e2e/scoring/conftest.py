"""The fixtures of tests/scoring, and the model of tests/vllm."""

from tests.scoring.conftest import connect, dealer, serve, spawn
from tests.vllm.conftest import model, tiny_llama

__all__ = ["connect", "dealer", "model", "serve", "spawn", "tiny_llama"]
