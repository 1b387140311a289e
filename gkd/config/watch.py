"""What is warned of while a run goes on, each warning naming the setting to change."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from gkd.config.base import Settings


def _rising(band: list[float]) -> list[float]:
    if band[0] >= band[1]:
        raise ValueError("a band goes from its lower to its upper end")
    return band


Band = Annotated[list[float], AfterValidator(_rising)]


class Watch(Settings):
    """Thresholds."""

    truncation_rate: float = Field(
        0.05, ge=0, le=1, description="share of responses cut off by rollout.max_response_length"
    )
    distill_kl: Band = Field(
        [0.0, 5.0], min_length=2, max_length=2, description="band of distill/reverse_kl, nats a token"
    )
    reference_kl: Band = Field(
        [-0.01, 0.5], min_length=2, max_length=2, description="band of actor/kl_reference, nats a token"
    )
    mismatch_kl: float = Field(0.02, gt=0, description="largest mismatch/kl between sampler and trainer, nats a token")
