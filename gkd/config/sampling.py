"""How responses are drawn from the student."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gkd.config.base import Settings

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Of samples, losses and scores alike."""


class Horizon(Settings):
    """Responses cut early at first: a limit that rises linearly over the first steps."""

    start: int | None = Field(
        None, ge=1, description="tokens a response may have at the first step; null: max_response_length throughout"
    )
    end: int | None = Field(None, ge=1, description="tokens it may have in the end; null: max_response_length")
    steps: int = Field(100, ge=1, description="steps from start to end")


class StudentSampling(Settings):
    """The part of the section ``rollout`` that states what is drawn."""

    max_response_length: int = Field(
        256, ge=1, description="tokens a response may have, with its end token (TRL's max_completion_length)"
    )
    temperature: float = Field(
        1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, description="temperature the student is sampled at"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus the student is sampled from")
    top_k: int | None = Field(
        None, ge=1, description="how many of the most likely tokens the student is sampled from; null: all"
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="share of the most likely token's probability below which no token is sampled"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off the logits of tokens that the response has already"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="texts that end a response, which has them, beside the end tokens of the model and of its chat "
        "template (slime: rollout_stop; transformers: stop_strings)",
    )
    horizon: Horizon = Horizon()

    @model_validator(mode="after")
    def _horizon_is_within_the_limit(self) -> StudentSampling:
        for name in ("start", "end"):
            length = getattr(self.horizon, name)
            if length is not None and length > self.max_response_length:
                raise ValueError(f"horizon.{name}={length} is beyond max_response_length={self.max_response_length}")
        if self.horizon.start is None and self.horizon.end is not None:
            raise ValueError(f"horizon.end={self.horizon.end} needs horizon.start")
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the student is sampled from as it is: at temperature 1, no token left out or penalised."""
        left_out = self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0
        return self.temperature == 1.0 and not left_out and self.presence_penalty == 0.0

    def limit_at(self, step: int) -> int:
        """Return tokens that a response of training ``step`` (from 1 on) may have, by ``horizon``."""
        start, end = self.horizon.start, self.horizon.end or self.max_response_length
        if start is None:
            return self.max_response_length
        return round(start + (end - start) * min(1.0, (step - 1) / self.horizon.steps))
