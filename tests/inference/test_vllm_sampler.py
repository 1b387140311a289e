"""What the sampler does around vLLM's engine; the engine itself is in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gkd.inference.vllm_sampler import VLLMSampler


def test_what_a_pass_under_way_finishes_is_answered_once() -> None:
    """As on a GPU, where two passes are under way when weights come."""
    sampler: Any = object.__new__(VLLMSampler)
    sampler._paused, sampler._finished, sampler._requests, sampler.forward_passes = False, [(1, "one")], {}, 0
    core = SimpleNamespace(batch_queue=["a pass", "another"])

    def step() -> list[Any]:
        if core.batch_queue:
            core.batch_queue.pop()
        return []

    whole = SimpleNamespace(engine_core=core)
    sampler.engine = SimpleNamespace(sleep=lambda **_: None, step=step, engine_core=whole)

    sampler.pause()
    assert sampler.forward_passes == 2 and sampler.step() == [(1, "one")]
