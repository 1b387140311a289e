"""The driver's view of the models that score: who serves, and who has died."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from gkd.cluster.failure import explain
from gkd.cluster.fleet import PRESENT, Fleet
from gkd.cluster.group import Pending
from gkd.cluster.restarts import Restarts
from gkd.errors import RunFailed

LOG = logging.getLogger("gkd")


class ScorerWatch:
    """Watches the servers of teachers, reference and reward model, ``serving`` by model.

    When a replica dies its clients try another one; without any the run fails at once instead of after a deadline.
    """

    def __init__(self, serving: Mapping[str, Pending], fleet: Fleet) -> None:
        self.fleet = fleet
        self._restarts = {model: Restarts(fleet, model) for model in serving}
        # Calls that end only when one fails: whose they are.
        self._calls: dict[Any, tuple[str, int, str]] = {}
        for model, calls in serving.items():
            fleet.add(model, len(calls.refs))
            for member, (ref, worker) in enumerate(zip(calls.refs, calls.workers, strict=True)):
                self._calls[ref] = model, member, worker

    @property
    def calls(self) -> list[Any]:
        """What ``ray.wait`` is to wait for; one that is done goes to :meth:`lose`."""
        return list(self._calls)

    def lose(self, call: Any) -> None:
        """Note that a replica serves no more. Raises what ended it where no other one of its model is there."""
        model, member, worker = self._calls.pop(call)
        try:
            ray.get(call)
            failure: Exception = RunFailed(f"{worker} stopped serving by itself")
        except Exception as error:
            failure = explain(error, worker)
        then = self._restarts[model].lose(member)
        others = len(self.fleet.members(model, *PRESENT))
        if self._restarts[model].is_lost:
            raise failure
        LOG.warning("%s; %d others of %s go on; %s", failure, others, model, then, extra={"kind": "death"})
