"""CISPO: REINFORCE with truncated importance weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.losses.clip import UPPER
from gkd.losses.surrogate import Surrogate

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Surrogate):
    """REINFORCE with truncated importance weights, ``-sg(min(r, 1 + high)) A log q``.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5: no token loses its gradient, and weights have an upper bound alone.
    """

    class Config(Settings):
        """Settings of the surrogate."""

        clip_high: float | None = Field(None, ge=0, description=UPPER)

    by_token: ClassVar[bool] = True

    def __init__(self, config: Config, usual_range: tuple[float, float]) -> None:
        super().__init__(config, usual_range)
        self.high = usual_range[1] if config.clip_high is None else config.clip_high

    def __call__(self, log_q: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the value of each of N tokens, [N]."""
        return -ratio.clamp(max=1 + self.high).detach() * advantages * log_q

    def clips(self, ratio: Tensor) -> Tensor:
        """Return whether each ratio is above 1 + high."""
        return ratio > 1 + self.high
