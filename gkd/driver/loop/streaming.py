"""Gradients of a batch that is still being sampled."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.actor.group import ActorGroup
from gkd.algorithms.training_samples import assign_advantages
from gkd.config import Config
from gkd.types import TrainingSample


class BatchStream:
    """Cuts one step's samples into chunks as they come, and has the actor add up their gradients.

    A chunk is as many samples, in the batch's order, as the actor's ranks hold in one micro-batch each; where rewards
    are learned from, whole groups of one prompt. So what is added to what depends on the samples alone, not on when
    they come. A batch of a single chunk is left whole.
    """

    def __init__(self, config: Config, actor: ActorGroup) -> None:
        self.config, self.actor = config, actor
        self.began = False
        """Whether a chunk was handed to the actor."""
        self._unit = config.rollout.n if config.algorithm.policy_weight else 1
        self._arrived: list[TrainingSample] = []  # of a group that is not whole yet
        self._chunk: list[TrainingSample] = []

    def feed(self, samples: Sequence[TrainingSample]) -> None:
        """Take the next samples of the batch, in its order."""
        self._arrived += samples
        whole: list[list[TrainingSample]] = []
        n_whole = len(self._arrived) - len(self._arrived) % self._unit
        for start in range(0, n_whole, self._unit):
            group = self._arrived[start : start + self._unit]
            if self._chunk and not self.actor.fits(self._chunk + group):
                whole.append(self._chunk)
                self._chunk = []
            self._chunk += assign_advantages(self.config, group)
        del self._arrived[:n_whole]
        self._hand_over(whole)

    def _hand_over(self, chunks: Sequence[Sequence[TrainingSample]]) -> None:
        if chunks:
            self.began = True
            self.actor.accumulate(chunks)

    def close(self) -> None:
        """Hand the last chunk over, once the whole batch has been fed; a batch of one chunk is left whole."""
        if self.began and self._chunk:
            self._hand_over([self._chunk])
            self._chunk = []

    def update(self, batch: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """Do the optimizer step, once the whole ``batch`` has been fed; returns its metrics.

        Where there were several chunks, ``timing_s/update`` among them is all that the actor computed for it.
        """
        self.close()
        return self.actor.apply(step) if self.began else self.actor.update(batch, step)
