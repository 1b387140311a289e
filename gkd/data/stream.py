"""In which order prompts are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gkd.errors import ConfigError
from gkd.types import Prompt


class PromptStream:
    """Prompts without end, those of each set newly shuffled every time all of them were taken.

    Without ``weights`` all prompts are one set. With them, one for each training file, a file is a set, and every
    position is given to the set that is furthest behind its share: any stretch of the stream has the shares of the
    weights, to within two prompts a set. What is taken may cross the end of an epoch, and holds a prompt more than once
    where there are fewer than it needs. The order depends on ``seed`` and the weights alone, and ``state`` is all that
    is needed to go on exactly.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, weights: Sequence[float] | None = None) -> None:
        if not prompts:
            raise ValueError("a stream needs prompts")
        self._prompts, self._seed = prompts, seed
        self._weights = None if weights is None else list(weights)
        if weights is None:
            self._sets, self._shares = [np.arange(len(prompts))], [1.0]
        else:
            files = np.array([prompt.file for prompt in prompts])
            self._sets = [np.flatnonzero(files == number) for number in range(len(weights))]
            self._shares = [weight / sum(weights) for weight in weights]
        for number, members in enumerate(self._sets):
            if not len(members):
                raise ConfigError(f"data.train_weights: no prompt of data.train_files[{number}] is short enough")
        self._drawn = [0] * len(self._sets)  # from each set
        self._shuffled: dict[int, tuple[int, NDArray[np.int64]]] = {}  # by set: epoch, and order in it

    @property
    def epoch(self) -> float:
        """Return passes over as many prompts as there are; 1.5 is half-way through the second."""
        return self.epoch_without(0)

    def epoch_without(self, n: int) -> float:
        """Return :attr:`epoch` without ``n`` of the prompts that were taken."""
        return (sum(self._drawn) - n) / len(self._prompts)

    def draw(self, n: int) -> list[int]:
        """Take the next ``n`` prompts; returns their indices, for :meth:`prompt_at`."""
        return [self._draw_one() for _ in range(n)]

    def prompt_at(self, index: int) -> Prompt:
        """Return the prompt of an index, the same for every stream over the same prompts."""
        return self._prompts[index]

    def state(self) -> dict[str, Any]:
        """Return where the stream stands, JSON-ready, for :meth:`restore`."""
        state: dict[str, Any] = {"drawn": sum(self._drawn), "n_prompts": len(self._prompts), "seed": self._seed}
        if self._weights is not None:
            state |= {"weights": self._weights, "drawn_by_file": list(self._drawn)}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ConfigError when it is of other prompts, another seed or other weights."""
        expected = {"n_prompts": len(self._prompts), "seed": self._seed, "weights": self._weights}
        for key, value in expected.items():
            if state.get(key) != value:
                raise ConfigError(f"the saved order of prompts has {key}={state.get(key)}, this run {key}={value}")
        self._drawn = list(state.get("drawn_by_file", [state["drawn"]]))

    def _draw_one(self) -> int:
        position = sum(self._drawn) + 1
        behind = [share * position - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        number = behind.index(max(behind))
        members = self._sets[number]
        epoch, index = divmod(self._drawn[number], len(members))
        if self._shuffled.get(number, (-1,))[0] != epoch:
            seed = (self._seed, epoch) if self._weights is None else (self._seed, epoch, number)
            self._shuffled[number] = (epoch, np.random.default_rng(seed).permutation(len(members)))
        self._drawn[number] += 1
        return int(members[self._shuffled[number][1][index]])
