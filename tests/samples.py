"""What the driver has of a sample, without one."""

from __future__ import annotations

from typing import Any

from gkd.types import TrainingSample, VersionSpan


def training_sample(
    key: int = 0, prompt_id: int = 0, index: int = 0, *, n_prompt: int = 4, n: int = 5, version: int = 0, **other: Any
) -> TrainingSample:
    """A single turn of ``n`` tokens after ``n_prompt``, that ended by itself unless ``other`` has another reason."""
    fields = {
        "n_tokens": n_prompt + n,
        "n_sampled": n,
        "finish_reason": "stop",
        "versions": (VersionSpan(n_prompt, n_prompt + n, version),),
        "worker": 0,
        "generated_s": 0.0,
        "scored_s": 0.0,
    }
    return TrainingSample(key, prompt_id, index, **(fields | other))
