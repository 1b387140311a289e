"""Engines that hang, with real processes: their work is done by the others, and nothing waits for them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from gkd.cluster.health.fleet import Health
from gkd.cluster.health.heartbeat import Heartbeat
from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.session import reaper
from gkd.cluster.session.port import free_port
from gkd.cluster.workers.group import Group, gather
from gkd.cluster.workers.reports import WorkerReports
from gkd.cluster.workers.reserve import RemoteWorker
from gkd.config import Config, load
from gkd.config.schedule import Schedule
from gkd.errors import RunFailed
from gkd.observability.metrics import memory_metrics
from gkd.rollout.group import RolloutGroup
from gkd.rollout.stream import SampleStream
from gkd.scoring.watch import ExpectedReplica, ScorerReplicas, ScorerWatch
from gkd.types import Prompt, SampleRequest, Sampling, TrainingSample
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import alive, eventually
from tests.samples import training_sample
from tests.weights.reports import reports

TIMEOUT_S = 5.0


@pytest.fixture
def engines(local_ray: None) -> Iterator[list[Group]]:
    """Filled by :func:`start`; ended after the test."""
    made: list[Group] = []
    yield made
    for group in made:
        for worker in group.workers:
            ray.kill(worker)


def settings() -> Config:
    return load(
        {"rollout": {"engine": "tests.ray.rollout.toy:ToyEngine", "engine_timeout_s": TIMEOUT_S, "max_num_seqs": 4}}
    )


def built(engines: list[Group], ranks: Sequence[int], target: str = "tests.ray.rollout.toy:ToyRollout") -> Group:
    workers = tuple(RemoteWorker.options(num_cpus=0).remote() for _ in ranks)
    engines.append(Group("rollout", workers, ()))
    worker_reports = tuple(reports("rollout", *(f"GPU-{i}" for i in range(max(ranks) + 1)))[rank] for rank in ranks)
    group = Group("rollout", workers, worker_reports)
    gather([group.submit_build(target, [(settings(), rank) for rank in ranks])], 120)
    node = ray.get_runtime_context().get_node_id()
    pids = group.control("pid", timeout_s=30)
    known = tuple(replace(r, pid=pid, node_id=node) for r, pid in zip(worker_reports, pids, strict=True))
    return Group("rollout", workers, known)


def start(engines: list[Group], n: int, restart_policy: RestartPolicy | None = None) -> RolloutGroup:
    return RolloutGroup(built(engines, range(n)), settings(), restart_policy=restart_policy)


def make_requests(n: int) -> list[SampleRequest]:
    return [SampleRequest(Prompt(i, np.array([i], np.int32), ""), 0, i, Sampling(4)) for i in range(n)]


def test_engines_that_hang_are_ended_and_others_do_their_work(
    engines: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """One whose process is stopped, one stuck in a pass, one stopped between its arrays and their numbers."""
    rollout = start(engines, 4)
    pids = [report.pid for report in rollout.group.reports]
    reports_of = WorkerReports()
    assert memory_metrics(reports_of.read([rollout.living_group])) == {"memory/rollout/process_gb": 4.0}
    os.kill(pids[3], signal.SIGSTOP)
    rollout.group.select([1]).control("get_stuck", timeout_s=30)
    rollout.group.select([2]).control("send_half", timeout_s=30)
    with caplog.at_level(logging.WARNING, "gkd"):
        for _ in range(2):
            assert memory_metrics(reports_of.read([rollout.living_group])) == {"memory/rollout/process_gb": 3.0}
            # For its first answer, without asking at every step.
            assert reports_of._is_unanswered(rollout.group.workers[3])
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("rollout rank 3 (pid ")
        caplog.clear()
        samples = rollout.collect(rollout.submit(make_requests(13)), timeout_s=120)
    assert [sample.prompt_id for sample in samples] == list(range(13))
    assert {sample.worker for sample in samples} == {0}
    assert rollout.present_engines == [0]
    named = sorted(message for message in caplog.messages if "rollout rank" in message)
    assert [message[:14] for message in named] == ["rollout rank 1", "rollout rank 2", "rollout rank 3"]
    assert all("5 s (rollout.engine_timeout_s)" in message for message in named)
    assert eventually(lambda: not any(map(alive, pids[1:])), 60)
    assert Path(f"/proc/{pids[0]}").exists()
    rollout.living_group.control("get_stuck", timeout_s=30)
    with pytest.raises(RunFailed, match=r"^rollout rank 0 \(pid \d+ .*\b5 s"):
        rollout.collect(rollout.submit(make_requests(2)), timeout_s=120)


def test_engines_come_back_and_sample_once_they_have_the_weights_until_they_are_given_up(
    engines: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """One of two that loses a process of its engine; both, killed, one of which does not start at first; and both more
    often than they may.
    """
    attempts: list[int] = []
    both_died = threading.Event()

    def start_again(member: int) -> Group:
        attempts.append(member)
        if len(attempts) > 1:  # whichever of the two deaths is known first
            assert eventually(lambda: both_died.is_set() or not rollout.working_engines)
            both_died.set()
        if attempts.count(0) == 1 and member == 0:
            raise RunFailed("no GPU")
        return built(engines, [member])

    rollout = start(engines, 2, RestartPolicy(2, start_again, []))
    sent: list[int] = []

    def send(stale: Sequence[int]) -> None:
        assert {rollout.engines.fleet.health(engine) for engine in stale} == {Health.STALE}
        assert not any(engine in rollout._dispatcher.at_work for engine in stale)
        sent.extend(rollout.call_engines("progress", timeout_s=30, activity="loading", engines=stale))
        rollout.mark_updated(dict.fromkeys(stale, 0))

    def kill(killed: Sequence[int]) -> list[int]:
        keys = rollout.submit(make_requests(30))
        if len(killed) == 1:
            rollout.group.select(killed).control("lose_process", timeout_s=30)
            return keys
        for engine in killed:
            os.kill(rollout.group.reports[engine].pid, signal.SIGKILL)
        return keys

    rollout.refresh = send
    with caplog.at_level(logging.WARNING, "gkd"):
        for killed in ([1], [0, 1]):
            sent.clear()
            samples = rollout.collect(kill(killed), timeout_s=120)
            assert [sample.prompt_id for sample in samples] == list(range(30))
            while len(rollout.working_engines) < 2:
                rollout.collect(rollout.submit(make_requests(8)), timeout_s=120)
            assert sorted(sent) == killed
            assert {sample.worker for sample in rollout.collect(rollout.submit(make_requests(8)), timeout_s=120)} == {
                0,
                1,
            }
        keys = kill([0, 1])
        with pytest.raises(RunFailed, match=r"^rollout rank \d \(.* died: "):
            rollout.collect(keys, timeout_s=120)
    assert sorted(attempts) == [0, 0, 1, 1]
    assert any(message.startswith("rollout rank 1 ") and "Executor failed." in message for message in caplog.messages)
    deaths = [record.getMessage() for record in caplog.records if getattr(record, "kind", "") == "death"]
    ends = [
        "its samples are done again by 1 other; it is started again (1 of cluster.worker_restarts=2)",
        "its samples wait for an engine; it is started again (",
        "in place of rollout 0 did not start: no GPU; it is started again (2 of cluster.worker_restarts=2)",
        "it is given up: cluster.worker_restarts=2",
    ]
    assert all(any(end in text for text in deaths) for end in ends), deaths


def test_replicas_of_a_scorer_come_back_at_their_address_until_they_are_given_up(
    engines: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """The only one, killed and then stopped, and killed once more than it may."""
    threads: list[threading.Thread] = []
    group = built(engines, [0], "tests.ray.rollout.toy:ToyScorer")
    restart_policy = RestartPolicy(
        2, lambda member: built(engines, [member], "tests.ray.rollout.toy:ToyScorer"), threads, within_s=60.0
    )
    watch = ScorerWatch([ScorerReplicas("teacher", group, ["tcp://a:1"], 3.0, restart_policy)])

    def lose() -> list[ExpectedReplica]:
        """What clients are to wait for until it is back."""
        replicas: list[ExpectedReplica] = []
        while not any(expected.within_s == 60.0 for expected in replicas):
            for ref in ray.wait(watch.calls, num_returns=1, timeout=0.2)[0]:
                watch.lose(ref)
            replicas += watch.poll()
        assert watch.list_absent_replicas() == [ExpectedReplica("teacher", "tcp://a:1", 60.0, "tcp://a:1")]
        assert watch.groups[0].workers == ()
        threads[-1].join(60)
        assert watch.poll() == [] and watch.list_absent_replicas() == []
        return replicas

    caplog.set_level(logging.WARNING, "gkd")
    for number in (signal.SIGKILL, signal.SIGSTOP):
        (report,) = watch.groups[0].reports
        os.kill(report.pid, number)
        expected = lose()
        # One that is only silent may be back within the time that a request has; so is one of whose death Ray is late.
        within = [each.within_s for each in expected]
        assert within == [3.0, 60.0] or (number == signal.SIGKILL and within == [60.0])
        assert watch.groups[0].reports[0].pid != report.pid
    texts = [record.getMessage() for record in caplog.records if getattr(record, "kind", "") == "death"]
    waits = "what teacher is to score waits for it; it is started again"
    assert texts[0].startswith("rollout rank 0 (pid ") and texts[0].endswith(
        f"{waits} (1 of cluster.worker_restarts=2)"
    )
    assert contains_in_order(texts[1], "3 s (teacher.request_timeout_s)", "(2 of cluster.worker_restarts=2)")
    os.kill(watch.groups[0].reports[0].pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"^rollout rank 0 \(.* died: "):
        lose()


def test_a_driver_that_stood_still_takes_nobody_for_hanging(engines: list[Group]) -> None:
    """Longer than engines have, between each two looks: they are asked before it is held against them."""
    rollout = start(engines, 1)
    heartbeat = Heartbeat(rollout.group, 0.5)
    heartbeat.begin()
    for _ in range(3):
        time.sleep(0.6)
        assert heartbeat.find_hanging([0]) == []


def test_what_is_late_ends_on_time_and_is_named(engines: list[Group]) -> None:
    """A batch, which ends the run; one engine of two with new weights, which is ended itself."""
    rollout = start(engines, 2)
    with pytest.raises(RunFailed, match=r"3 samples .* 0\.5 s .*: rollout rank 0 .*\b2\b"):
        rollout.collect(rollout.submit(make_requests(3)), timeout_s=0.5)
    pids = [report.pid for report in rollout.group.reports]
    os.kill(pids[1], signal.SIGSTOP)
    assert set(rollout.call_engines("progress", timeout_s=5.0, activity="telling")) == {0}
    assert rollout.present_engines == [0]
    assert eventually(lambda: not alive(pids[1]), 60)
    assert len(rollout.collect(rollout.submit(make_requests(2)), timeout_s=60)) == 2


def test_a_batch_may_take_any_time_while_it_gets_on(engines: list[Group]) -> None:
    """As long responses of a large batch on few GPUs do, a second for every four here."""
    rollout = start(engines, 1)
    began = time.monotonic()
    samples = rollout.collect(rollout.submit(make_requests(28)), timeout_s=4.0)
    assert len(samples) == 28 and time.monotonic() - began > 4.0


def test_the_time_of_whoever_takes_samples_is_no_waiting_for_them(engines: list[Group]) -> None:
    """Such as that of a checkpoint, or of an actor whose processes are started again."""
    rollout = start(engines, 1)
    arriving = rollout.collect_in_order(rollout.submit(make_requests(6)), timeout_s=5.0)
    assert next(arriving) == []
    time.sleep(5.5)
    assert sum(map(len, arriving)) == 6


def test_what_many_engines_have_finished_is_taken_in_together(engines: list[Group]) -> None:
    """The driver looks at every engine each time: one time for each sample would keep it busy where there are many."""
    rollout, n_looks = start(engines, 4), 0
    streams = [stream.items for stream in rollout.engines._streams.values()]
    keys = rollout.submit(make_requests(4))
    while len(rollout._done) < len(keys):
        ray.wait(streams, num_returns=len(streams), timeout=5.0, fetch_local=False)
        rollout.attend()
        n_looks += 1
    assert n_looks <= 5 < 2 * len(keys)  # arrays and numbers, perhaps after a notice, that each sends


def test_an_engine_that_is_drained_samples_from_new_weights_while_another_one_ends_what_it_has(
    engines: list[Group],
) -> None:
    ahead = settings().model_copy(update={"schedule": Schedule(max_staleness=1)})
    rollout = RolloutGroup(built(engines, range(2)), ahead)
    first = rollout.submit(make_requests(2), order=1)
    pid = rollout.group.reports[1].pid
    rollout.version = 1
    os.kill(pid, signal.SIGSTOP)
    assert rollout.drain(60) == [0]
    rollout.group.select([0]).control("load", 1, timeout_s=30)
    rollout.mark_updated({0: 1})
    then = rollout.submit(make_requests(2), order=2)
    later = rollout.collect(then, timeout_s=60)
    assert [(sample.worker, sample.versions[-1].version) for sample in later] == [(0, 1), (0, 1)]
    assert first[1] not in rollout._done
    os.kill(pid, signal.SIGCONT)
    assert rollout.drain(60, together=True) == [1]
    rollout.group.select([1]).control("load", 1, timeout_s=30)
    rollout.mark_updated({1: 1})
    assert not rollout.drain(60)
    earlier = rollout.collect(first, timeout_s=60)
    assert [(sample.worker, sample.versions[-1].version) for sample in earlier] == [(0, 0), (1, 0)]
    with pytest.raises(RunFailed, match=r"rollout rank 1 .*weights 2, .* 1$"):  # the engine itself refuses others
        rollout.version = 2
        rollout._dispatcher.versions[1] = 2
        rollout.collect(rollout.submit(make_requests(1)), timeout_s=60)


def test_batches_are_requested_ahead_and_collected_one_by_one(engines: list[Group]) -> None:
    """Earlier ones go to the engines first; what one of these loses goes to the other; a drain waits for sampling."""
    rollout = start(engines, 2)
    later = rollout.submit(make_requests(10), order=2)
    first = rollout.submit(make_requests(6), order=1)
    assert rollout._dispatcher.n_waiting == 8  # 4 of the later are with each engine
    pid = rollout.group.reports[1].pid
    os.kill(pid, signal.SIGKILL)
    rollout.version = 1
    assert rollout.drain(timeout_s=120) == [0] == rollout.present_engines
    assert rollout.group.select([0]).control("progress", timeout_s=30)[0][1] == 0
    samples = [rollout.collect(keys, timeout_s=120) for keys in (first, later)]
    assert [[sample.prompt_id for sample in of] for of in samples] == [list(range(6)), list(range(10))]
    # Of what waited, the first batch went out before the rest of the second, whose requests of engine 1 came back.
    ends = [{sample.key: sample.generated_s for sample in of} for of in samples]
    assert max(ends[0].values()) <= max(ends[1].values())
    assert not rollout._done and not len(rollout._dispatcher)
    gate = ray.remote(num_cpus=0)(threading.Event).remote()
    rollout.attend([gate.wait.remote()])  # with nothing to do it comes back by itself
    ray.kill(gate)


@pytest.mark.parametrize(
    ("listed", "later"),
    [(False, False), (True, False), (False, True)],
    ids=["that Ray knows to be gone", "that Ray still lists", "a moment after the engine"],
)
def test_what_was_finished_on_a_node_that_left_is_sampled_again(
    listed: bool, later: bool, engines: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was collected; what had been finished elsewhere stays."""
    rollout = start(engines, 2)
    if listed:  # though nothing listens there any more
        left = {"NodeID": "left", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": free_port()}
        monkeypatch.setattr(ray, "nodes", lambda: [left])
    keys = rollout.submit(make_requests(8))
    while len(rollout._done) < len(keys):
        rollout.attend()
    assert {sample.worker for sample in rollout._done.values()} == {0, 1}
    kept, leaves = rollout.group.reports
    left_group = replace(rollout.group, reports=(kept, replace(leaves, node_id="left")))
    if not later:
        rollout.engines.group = left_group
    (collected,) = rollout.collect(keys[:1], timeout_s=1)
    elsewhere = {key: sample for key, sample in rollout._done.items() if sample.worker == 0}
    os.kill(leaves.pid, signal.SIGKILL)
    while rollout.present_engines == [0, 1]:
        rollout.attend()
    if later:
        assert len(rollout._done) == len(keys) - 1  # its node holds what it had finished
        rollout.engines.group = left_group
    samples = rollout.collect(keys[1:], timeout_s=120)
    assert [sample.prompt_id for sample in (collected, *samples)] == list(range(8))
    assert {sample.worker for sample in samples} == {0}
    assert all(samples[keys.index(key) - 1] is sample for key, sample in elsewhere.items())
    assert not rollout._done and not rollout._requests


def test_a_stream_ends_after_so_many_messages_and_the_next_goes_on_with_what_follows(engines: list[Group]) -> None:
    """What Ray keeps of every item of a stream goes with it."""
    group = built(engines, range(2))
    group.control("send_at_most", 1, timeout_s=30)
    rollout = RolloutGroup(group, settings())
    first = dict(rollout.engines._streams)
    for _ in range(3):
        samples = rollout.collect(rollout.submit(make_requests(8)), timeout_s=120)
        assert [sample.prompt_id for sample in samples] == list(range(8))
        assert {sample.worker for sample in samples} == {0, 1} and len(rollout.fetch(samples)) == 8
    assert all(rollout.engines._streams[engine].items is not stream.items for engine, stream in first.items())


def test_samples_on_their_way_keep_nobody_waiting(local_ray: None) -> None:
    """Their arrays are here and they are not, as between nodes: the stream is late, and goes on when they have come."""
    gate = ray.remote(num_cpus=0, max_concurrency=2)(threading.Event).remote()

    @ray.remote(num_cpus=0)
    def numbers(opened: list[object]) -> list[TrainingSample]:
        ray.get(opened)
        return [training_sample(3)]

    arrays = ray.put(["arrays"])
    stream = SampleStream(iter([arrays, numbers.remote([gate.wait.remote()])]))
    assert stream.take() == [] and not stream.is_late
    assert stream.take() == [] and stream.is_late
    assert stream.take() == [] and stream.is_late
    ray.get(gate.set.remote(), timeout=30)
    assert eventually(stream._late.done, 60)
    assert stream.take() == [training_sample(3, ref=arrays)]
    assert not stream.is_late
    ray.kill(gate)


def test_what_an_engine_on_a_gpu_shares_with_its_processes_does_not_outlive_them() -> None:
    """On one GPU too, where Ray kills the worker with its children as the driver of a cluster's run is killed."""
    program = """
import sys, time
from multiprocessing import shared_memory
from tests.ray.rollout.test_group import settings
from tests.ray.rollout.toy import ToyRollout
worker = ToyRollout(settings(), 0, sys.argv[1])
memory = shared_memory.SharedMemory(create=True, size=8)
print("/dev/shm/" + memory.name, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program, "cuda"], stdout=subprocess.PIPE, text=True) as process:
        deadline = threading.Timer(120, process.kill)
        deadline.start()
        try:
            assert process.stdout is not None
            name = Path(process.stdout.readline().strip())
            for _ in range(10):  # a machine that stands still takes the time of one of them
                time.sleep(reaper.RECORD_EVERY_S)
            assert name.exists()
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # gone with another one
                    child.kill()
        finally:
            deadline.cancel()
            process.kill()
    assert eventually(lambda: not name.exists())
