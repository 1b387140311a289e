"""Which sampling engines there are: what they finish, as it comes, who died or hangs, and who is back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.health.watched import RestartPolicy, WatchedGroup
from gkd.cluster.session.port import listens
from gkd.cluster.workers.failure import WorkerDied, explain
from gkd.cluster.workers.group import Group, PendingCall, owners
from gkd.rollout.stream import SampleStream
from gkd.scoring.client import ScoringClient
from gkd.scoring.watch import ExpectedReplica, ScorerWatch
from gkd.types import GenerationNotice, SampleRequest, TrainingSample

log = logging.getLogger("gkd")
FETCH_TIMEOUT_S = 300.0
POLL_EVERY_S = 1.0
NODE_ANSWERS_S = 2.0
LATE_EVERY_S = 0.05  # where samples are on their way between nodes

StreamItem = TrainingSample | GenerationNotice


class EngineGroup(WatchedGroup):
    """The workers of ``group``, one an engine, each of which runs its engine from the start.

    One that died is started again by ``restart_policy``. One that does nothing for ``timeout_s`` while it has work
    hangs. ``followers`` are parts of engines on further nodes: when one fails, its leader ends, and this is the reason.
    ``scorers`` are watched meanwhile, for the engines and for ``clients`` of this process, by model.
    """

    def __init__(
        self,
        group: Group,
        timeout_s: float,
        scorers: ScorerWatch,
        followers: Sequence[PendingCall],
        restart_policy: RestartPolicy | None,
        clients: Mapping[str, ScoringClient],
    ) -> None:
        super().__init__("rollout", group, timeout_s, "rollout.engine_timeout_s", restart_policy)
        self.scorers, self._clients = scorers, clients
        self._followers = owners(followers)
        self._streams: dict[int, SampleStream] = {}
        for engine in self.fleet.working:
            self._serve(engine)

    def _serve(self, engine: int) -> None:
        """Have an engine's worker run it; what that raises comes out of the stream."""
        self.group.select([engine]).submit("serve")
        self._stream(engine)

    def _stream(self, engine: int) -> None:
        self._streams[engine] = SampleStream(self.group.stream(engine, "stream_samples"))

    def submit(self, engine: int, requests: Sequence[SampleRequest]) -> None:
        """Give an engine requests."""
        self.group.workers[engine].control.remote("submit", requests)

    def poll(self) -> None:
        """Take in engines that are back, and have all of them wait for scorers that are being started."""
        self.take_in_restarted()
        self._expect_scorers(self.scorers.poll(), self.fleet.present)

    def collect(
        self, deadline: float, calls: Sequence[Any]
    ) -> tuple[dict[int, list[StreamItem]], dict[int, WorkerDied]]:
        """Return samples that come within a second or so, and of whom none will come any more, both by engine.

        There are none when one of ``calls`` is done before. Raises what else ends a stream.
        """
        late = [engine for engine, stream in self._streams.items() if stream.is_late]
        engines = {stream.items: engine for engine, stream in self._streams.items() if not stream.is_late}
        scoring = self.scorers.calls
        watched = [*engines, *scoring, *self._followers, *calls]
        left = min(LATE_EVERY_S if late else POLL_EVERY_S, max(0.0, deadline - time.monotonic()))
        # Arrays stay on their node until the actor wants them.
        ready: list[Any] = []
        if watched and ray.wait(watched, num_returns=1, timeout=left, fetch_local=False)[0]:
            # All that is there by now: one look at every engine for each sample would keep the driver busy.
            ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0, fetch_local=False)
        elif not watched:
            time.sleep(left)
        for ref in ready:
            if ref in scoring:
                self._warn_of_followers()
                self.scorers.lose(ref)
            elif ref in self._followers:
                self._warn_of_followers()
        came: dict[int, list[StreamItem]] = {}
        died: dict[int, WorkerDied] = {}
        for engine in [*late, *(engines[ref] for ref in ready if ref in engines)]:
            try:
                came[engine] = self._take(engine)
            except WorkerDied as failure:
                died[engine] = failure
        return came, died

    def _take(self, engine: int) -> list[StreamItem]:
        """Return samples that an engine has finished."""
        try:
            return self._streams[engine].take()
        except StopIteration:  # a stream ends after so many items
            self._stream(engine)
            return []
        except RayError as error:
            raise explain(error, str(self.group.reports[engine])) from error

    def drop(self, engine: int) -> None:
        """Take no more samples of an engine that died."""
        self._warn_of_followers()
        del self._streams[engine]

    def has_lost_node(self, engine: int) -> bool:
        """Return whether the node of an engine that died has left as well, with the samples that are stored there."""
        service, node_id = self.group.service, self.group.reports[engine].node_id
        if service is not None and not service.is_responding():  # which has the list of nodes
            return False
        # Ray takes seconds to note that a node went down.
        node = next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)
        return node is None or not listens(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", NODE_ANSWERS_S)

    def take_in_restarted(self) -> dict[int, str]:
        """Take in the new workers of engines that died; they sample once they have the weights."""
        texts = super().take_in_restarted()
        for engine, text in texts.items():
            self._serve(engine)
            log.info("%s; it gets the weights", text, extra={"kind": "restart"})
            self._expect_scorers(self.scorers.list_absent_replicas(), [engine])
        return texts

    def _expect_scorers(self, expected: Iterable[ExpectedReplica], engines: Sequence[int]) -> None:
        """Have clients wait for scorers that are being started, and prefer others to those that are suspect."""
        for replica in expected:
            for engine in engines:
                self.group.workers[engine].control.remote("pipeline.expect_scorer", *replica)
            if replica.model in self._clients:
                self._clients[replica.model].expect(replica.name, replica.within_s, replica.address, replica.suspect)

    def _warn_of_followers(self) -> None:
        """Name the parts of engines that have failed, which is why their leaders end."""
        if not self._followers:
            return
        failed, _ = ray.wait(list(self._followers), num_returns=len(self._followers), timeout=0)
        for serving in failed:
            worker = self._followers.pop(serving)
            try:
                ray.get(serving, timeout=FETCH_TIMEOUT_S)
            except Exception as error:
                reason = explain(error, worker)
                log.warning("%s is lost, and the engine that it is a part of with it: %s", worker, reason)
