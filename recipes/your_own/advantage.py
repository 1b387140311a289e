"""An advantage estimator of one's own: against a fixed baseline."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gkd.algorithms.advantages import AdvantageEstimator, Float64


class FixedBaseline(AdvantageEstimator):
    """``r - baseline``, as in REINFORCE (Williams, 1992): also groups whose rewards are all equal are learned from."""

    class Config(BaseModel):
        """Becomes ``algorithm.advantage.baseline``."""

        baseline: float = Field(0.5, description="reward that is neither good nor bad")

    config: Config

    def compute_advantages(self, rewards: Float64) -> Float64:
        """Compute the advantages [n] of the n samples of one prompt whose rewards are known."""
        return rewards - self.config.baseline
