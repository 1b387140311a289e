"""Calling the workers of a group: order, concurrency, and what is said when one fails, dies or is late."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from gkd.cluster.session import reaper
from gkd.cluster.session.connect import connect
from gkd.cluster.workers.failure import WorkerDied, explain
from gkd.cluster.workers.group import gather, gather_partners, kill_worker
from gkd.cluster.workers.placement import place
from gkd.cluster.workers.reserve import read_nodes
from gkd.errors import ConfigError, RunFailed
from tests.error_text import contains_in_order
from tests.ray.cluster import cluster_targets
from tests.ray.cluster.conftest import alive, configuration, eventually

ECHO = "tests.ray.cluster.cluster_targets:Echo"


@pytest.fixture(scope="module")
def groups(cluster):
    """Actor of one worker and rollout of two, built together."""
    config = configuration(1, 2, None)
    with connect(config) as session:
        by_name = place(config, session).groups
        gather(
            [
                by_name["actor"].submit_build(ECHO, [(0,)], environment={"OMP_NUM_THREADS": "3"}),
                by_name["rollout"].submit_build(ECHO, [(0,), (1,)]),
            ],
            60,
        )
        yield by_name
    assert eventually(lambda: sum(node.free_gpus for node in read_nodes()) == 32)


def test_results_come_in_rank_order_from_the_thread_that_built(groups):
    rollout = groups["rollout"]
    assert rollout.call("rank_times", 10, timeout_s=20) == [0, 10]
    assert gather([rollout.submit_each("rank_times", [(1,), (5,)])], 20) == [[0, 5]]
    assert all(rollout.call("same_thread", timeout_s=20)[0] for _ in range(20))
    assert rollout.call("torch_loaded", timeout_s=20) == [False, False]
    assert groups["actor"].call("environment", "OMP_NUM_THREADS", timeout_s=20) == ["3"]
    assert rollout.call("environment", "CUDA_DEVICE_ORDER", timeout_s=20) == ["PCI_BUS_ID"] * 2
    with pytest.raises(RunFailed, match="build came"):
        gather([rollout.submit_build(ECHO, [(0,), (1,)])], 20)


def test_what_was_there_when_a_worker_was_built_is_in_no_later_collection(groups):
    for frozen, searched in groups["rollout"].call("heap", timeout_s=20):
        assert frozen > 10_000 > searched


def test_control_gets_through_while_call_is_busy(groups):
    rollout = groups["rollout"]
    busy = rollout.submit("wait_for_flag")
    assert rollout.control("rank_times", 2, timeout_s=60) == [0, 2]
    rollout.control("set_flag", timeout_s=60)
    assert gather([busy], 60) == [[True, True]]


def test_a_stream_yields_each_item_as_soon_as_it_is_there(groups):
    actor = groups["actor"]
    stream = actor.stream(0, "count", 4)
    assert [ray.get(next(stream)) for _ in range(2)] == [0, 1]
    actor.control("set_flag", timeout_s=60)
    assert [ray.get(item) for item in stream] == [2, 3]


def test_an_error_in_a_stream_is_named_too(groups):
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(next(groups["rollout"].stream(1, "count", "many")))
    error = explain(caught.value, str(groups["rollout"].reports[1]))
    assert re.match(r"rollout rank 1 .* raised TypeError: ", str(error))


def test_one_that_ray_ended_for_lack_of_memory_is_dead_and_others_can_go_on():
    error = explain(ray.exceptions.OutOfMemoryError("3 workers were killed\nby a long\ntable"), "rollout rank 0")
    assert isinstance(error, WorkerDied)
    assert contains_in_order(str(error), "rollout rank 0 ", "memory") and "table" not in str(error)


def test_the_first_failure_is_raised_at_once_and_names_the_worker(groups):
    rollout = groups["rollout"]
    second = re.escape(str(rollout.reports[1]))
    place = rf"\({re.escape(cluster_targets.__file__)}, line \d+\)"  # as of a loss of the user's own
    with pytest.raises(RunFailed, match=rf"^rollout rank 1 .*{second[-10:]} raised ValueError: two lines {place}$"):
        rollout.call("fail", 1, "value", timeout_s=60)
    rollout.control("set_flag", timeout_s=60)


def test_an_error_that_nobody_waits_for_is_one_line_and_its_traceback_is_in_the_workers_log(groups, cluster, caplog):
    """Ranks that fail alike are one line together, and what a user is to read has no traceback anywhere."""
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    pids = [report.pid for report in groups["rollout"].reports]
    groups["rollout"].submit_each("fail", [(0, "value"), (1, "value")])
    groups["actor"].submit("fail", 0, "run")

    def read_lines():  # others may come of what earlier tests left
        return sorted(text for text in caplog.messages if "two lines" in text)

    assert eventually(lambda: len(read_lines()) == 2)
    texts = read_lines()
    assert contains_in_order(texts[0], "raised ValueError: ", "cluster_targets.py")
    assert texts[1].endswith(": two lines")

    def read_log(pid):
        return "".join(file.read_text() for file in logs.glob(f"worker-*-{pid}.err"))

    assert eventually(lambda: all("ValueError: two" in read_log(pid) for pid in pids))
    assert "Traceback" not in read_log(groups["actor"].reports[0].pid)


@pytest.mark.parametrize(("kind", "raised"), [("config", ConfigError), ("run", RunFailed)])
def test_our_own_errors_come_out_as_they_are(groups, kind, raised):
    with pytest.raises(raised, match=r"^two\nlines$"):
        groups["actor"].call("fail", 0, kind, timeout_s=30)


def test_a_timeout_says_what_was_awaited_and_for_how_long(groups):
    with pytest.raises(RunFailed, match=r"^actor: holding still: .*\b0\.5 s, .*actor rank 0 \(pid \d+ on "):
        groups["actor"].call("wait_for_flag", timeout_s=0.5, activity="holding still")
    groups["actor"].control("set_flag", timeout_s=60)


def test_a_long_wait_says_every_while_what_it_waits_for(groups, caplog):
    caplog.set_level(logging.INFO, "gkd")
    call = groups["actor"].submit("wait_for_flag", activity="loading much")
    with pytest.raises(RunFailed, match="loading much"):
        gather([call], 2.5, announce_s=0.5)
    groups["actor"].control("set_flag", timeout_s=60)
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 4 and all(contains_in_order(line, "loading much", "actor rank 0 (pid") for line in lines)


def test_a_death_names_the_worker_and_the_reason(placed):
    by_name = placed(configuration(1, 2, None)).groups
    actor, rollout = by_name["actor"], by_name["rollout"]
    gather([actor.submit_build(ECHO, [(0,)]), rollout.submit_build(ECHO, [(0,), (1,)])], 60)
    pid = rollout.reports[1].pid
    # One that waited for it fails first, as in a collective.
    together = rollout.submit("fail", 0, "value")
    assert ray.wait([together.refs[0]], timeout=30)[0]
    os.kill(pid, 9)
    with pytest.raises(WorkerDied, match=rf"^rollout rank 1 \(pid {pid} on .*\) died: .*rank 0\b.*ValueError"):
        gather_partners([together], 30)
    with pytest.raises(RunFailed, match=rf"^rollout rank 1 \(pid {pid} on .*\) died: "):
        gather([rollout.submit("wait_for_flag")], 30)
    with pytest.raises(RunFailed, match=r"^actor rank 0 .* died: ") as caught:
        actor.call("die", timeout_s=30)
    assert "\n" not in str(caught.value)


def test_calling_before_building_is_said(placed):
    actor = placed(configuration(1, 1, None)).groups["actor"]
    with pytest.raises(RunFailed, match=r"rank_times .*built"):
        actor.call("rank_times", 1, timeout_s=30)
    with pytest.raises(RunFailed, match=r"raised ModuleNotFoundError: .*'nowhere'"):
        gather([actor.submit_build("nowhere:Thing", [()])], 30)


def test_children_of_workers_end_with_the_session(cluster):
    config = configuration(1, 1, None)
    with connect(config) as session:
        actor = place(config, session).groups["actor"]
        gather([actor.submit_build(ECHO, [(0,)])], 30)
        (child,) = actor.call("spawn_child", timeout_s=30)
        assert alive(child)
    assert eventually(lambda: not alive(child))


def test_what_a_process_shares_with_its_children_does_not_outlive_them():
    """As vLLM's queues between the processes of an engine: nobody else removes it where Ray kills the worker."""
    program = """
import os, sys, time
from multiprocessing import shared_memory
from gkd.cluster.workers.worker import end_family
memory = shared_memory.SharedMemory(create=True, size=8)
if os.fork() == 0:
    time.sleep(600)
print("/dev/shm/" + memory.name, flush=True)
sys.stdin.readline()
end_family(os.getpid(), itself=False)
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    name = Path(process.stdout.readline().strip())
    children = [child.pid for child in psutil.Process(process.pid).children()]
    assert name.exists() and len(children) == 2  # the other tracks what is shared, until it is killed as well
    process.communicate("\n", timeout=60)
    assert not name.exists() and not any(map(alive, children))


def test_what_processes_share_is_removed_when_all_of_them_are_killed_at_once():
    """As Ray does with the workers of a driver that was killed: none of them has time for it."""
    program = """
import os, sys, time
from multiprocessing import shared_memory
from gkd.cluster.session.reaper import watch_family
watch_family()
memory = shared_memory.SharedMemory(create=True, size=8)
if os.fork() == 0:
    children = shared_memory.SharedMemory(create=True, size=8)
    print("/dev/shm/" + memory.name, "/dev/shm/" + children.name, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    names = [Path(name) for name in process.stdout.readline().split()]
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)] + [process.pid]
    for _ in range(10):  # a machine that stands still takes the time of one of them
        time.sleep(reaper.RECORD_EVERY_S)
    assert len(names) == 2 and all(name.exists() for name in names)
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert eventually(lambda: not any(name.exists() for name in names))


def test_a_worker_is_killed_with_its_children_and_nobody_else_is():
    """As parts of an engine on several GPUs, which wait for each other in a collective for good."""
    family = "sleep 1000 & sleep 1000 & echo $!; wait"
    worker = subprocess.Popen(["bash", "-c", f"exec -a ray::toy bash -c '{family}'"], stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen(["sleep", "1000"])
    try:
        child = int(worker.stdout.readline())
        worker.send_signal(signal.SIGSTOP)
        kill_worker(other.pid)
        kill_worker(worker.pid)
        assert worker.wait(30) == -signal.SIGKILL
        assert eventually(lambda: not alive(child))
        assert other.poll() is None
        kill_worker(worker.pid)  # it is gone already
    finally:
        kill_worker(worker.pid)
        other.kill()
        other.wait()
