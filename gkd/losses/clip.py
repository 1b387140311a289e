"""The clipped surrogate of PPO, GRPO and DAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from gkd.config.base import Settings
from gkd.losses.surrogate import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

UPPER = "upper clip range; null: 0.2, of a sequence's ratio 4e-4 (TRL: epsilon_high; verl: clip_ratio_high)"


class Clip(Surrogate):
    """PPO's clipped surrogate with a range for each side, ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    Schulman et al., arXiv 1707.06347, eq. 7; GRPO's (arXiv 2402.03300, eq. 3) with ``low = high``; clip-higher of DAPO
    (arXiv 2503.14476, eq. 8) with ``high > low``. The gradient is 0 where the clipped term is the smaller one.
    """

    class Config(Settings):
        """Settings of the surrogate."""

        clip_low: float | None = Field(
            None,
            ge=0,
            description="lower clip range; null: 0.2, of a sequence's ratio 3e-4 (TRL: epsilon; verl: clip_ratio_low, "
            "cliprange)",
        )
        clip_high: float | None = Field(None, ge=0, description=UPPER)

    by_token: ClassVar[bool] = True

    def __init__(self, config: Config, usual_range: tuple[float, float]) -> None:
        super().__init__(config, usual_range)
        self.low = usual_range[0] if config.clip_low is None else config.clip_low
        self.high = usual_range[1] if config.clip_high is None else config.clip_high

    def __call__(self, log_q: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return the value of each of N tokens, [N]."""
        import torch

        del log_q  # whose gradient the ratio has
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def clips(self, ratio: Tensor) -> Tensor:
        """Return whether each ratio is outside of [1 - low, 1 + high]."""
        return (ratio > 1 + self.high) | (ratio < 1 - self.low)
