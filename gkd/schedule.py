"""Which prompts are sampled for which step, and when: tickets. Pure bookkeeping, without Ray, torch or prompts.

Every prompt is admitted *for* a step, and a step trains exactly its tickets. Those of step ``s`` may be sampled once
the weights' version is at least ``s - 1 - max_staleness``; version ``v`` are the weights after step ``v``, and step
``s`` starts from version ``s - 1``. So no token is staler than that, whatever takes how long, and nothing is evicted,
discarded or trained twice: the actor waits for what is late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """One prompt of ``step``: the ``place``-th that is sampled for it. ``prompt`` is its index among all prompts."""

    step: int
    place: int
    prompt: int


class TicketSchedule:
    """Admits the steps after ``trained`` up to ``total_steps``, ``batch_size`` prompts each.

    ``draw(n)`` takes the next ``n`` prompts in their order and returns their indices. ``ahead`` are steps that were
    admitted before a checkpoint and not trained, with their prompts, which they get again.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        total_steps: int,
        draw: Callable[[int], list[int]],
        trained: int = 0,
        ahead: Mapping[int, list[int]] | None = None,
    ) -> None:
        self.batch_size, self.max_staleness, self.total_steps = batch_size, max_staleness, total_steps
        self._draw, self._next = draw, trained + 1
        self._places: dict[int, int] = {}  # tickets so far, by step that is not trained
        self._prompts = {step: prompts for step, prompts in (ahead or {}).items() if step > trained}

    def admit(self, version: int) -> list[list[Ticket]]:
        """Return the batches that may be sampled now that the weights are of ``version``, each once, in order."""
        batches = []
        while self._next <= min(version + 1 + self.max_staleness, self.total_steps):
            step, self._next = self._next, self._next + 1
            if step not in self._prompts:
                self._prompts[step] = self._draw(self.batch_size)
            self._places[step] = 0
            batches.append(self._tickets(step, self._prompts[step]))
        return batches

    def replace(self, step: int, n: int) -> list[Ticket]:
        """Admit ``n`` further prompts for an admitted ``step``, in place of some that nothing is learned from.

        Their places go on from the next multiple of ``batch_size``, so that they depend on how often this was called.
        """
        return self._tickets(step, self._draw(n))

    def _tickets(self, step: int, prompts: list[int]) -> list[Ticket]:
        first = self._places[step]
        self._places[step] = first + self.batch_size
        return [Ticket(step, place, prompt) for place, prompt in enumerate(prompts, first)]

    def steps_ahead(self, step: int) -> dict[int, list[int]]:
        """Return the steps after ``step`` that have prompts, with these, for a checkpoint; forgets those up to it."""
        for by_step in (self._prompts, self._places):
            for done in [number for number in by_step if number <= step]:
                del by_step[done]
        return dict(sorted(self._prompts.items()))
