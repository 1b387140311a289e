"""A private Ray ends with its run, in whatever way that ends; an address that does not answer is one line."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gkd.cluster import gpu
from gkd.cluster.session import connect as session_module
from gkd.cluster.session import reaper
from gkd.cluster.session.connect import connect
from gkd.cluster.session.control_service import VARIABLE
from gkd.cluster.session.local import NICENESS, PRESTART
from gkd.errors import ConfigError, RunFailed
from tests.e2e.on_a_cluster.conftest import free_port
from tests.error_text import contains_in_order
from tests.ray.cluster.conftest import alive, configuration, eventually

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start():
    """What starts a run that takes its workers; none outlives its test, however that ends."""
    runs = []

    def start_run(*arguments, **environment):
        # The parent lists GPUs that do not count from 0, so ids and ranges are to be taken from its list.
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7", **environment}
        for name in (NICENESS, PRESTART):
            variables.pop(name, None)
        run = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.cluster.run_for_long", *arguments],
            cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(run)
        return run

    yield start_run
    for run in runs:
        run.kill()
        run.wait()


def directory_and_pids(run):
    """Directory and pids that a run tells once it is up."""
    word, directory, *pids = run.stdout.readline().split()
    assert word == "at"
    return directory, [int(pid) for pid in pids]


def read(pid, name):
    """What /proc has of a process; nothing of one that is gone meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text()
    return ""


def group_of(pid):
    """The group of a process; None of one that is gone meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def test_no_process_is_left_after_sigterm_sigkill_or_ctrl_c(start):
    """Also of the runs beside: each ends its own processes and no other's."""
    first, second = start(), start(RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1")
    (directory, pids), (other, other_pids) = directory_and_pids(first), directory_and_pids(second)
    assert len(pids) == 3
    servers = [read(pid, "cmdline") for pid in reaper.processes_of(directory)]
    unneeded = "dashboard.py", "monitor.py", "log_monitor.py"
    assert [text for text in servers if any(name in text for name in unneeded)] == []
    # Those that read the indices of the GPUs, one or two. By itself Ray has one for each of 8 cores, whoever needs it.
    assert sum("ray::IDLE" in text for text in servers) < 8 - len(pids)
    for pid in pids:  # a terminal that closes sends it to all of them, and the run needs its workers for a checkpoint
        (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
        assert int(blocked, 16) & 1 << signal.SIGHUP - 1
    # By Ray's own niceness, 15, workers stand still beside other programs.
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.nice(0)}
    # What is sent to the run's own group, as by `timeout`, is for the run alone.
    group = os.getpgid(first.pid)
    assert [pid for pid in reaper.processes_of(directory) if group_of(pid) == group] == [first.pid]
    assert first.stdout.readline() == second.stdout.readline() == "GPU Assignments: ['6', '4']\n"
    assert all(map(alive, pids + other_pids))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # a launcher and a terminal at the same time
        first.send_signal(number)
    ends = [(143, "stopped by SIGTERM\n"), (130, "stopped by Ctrl-C\n")]  # Python may see the second one first
    assert (first.wait(timeout=60), first.stderr.read()) in ends
    assert not any(map(alive, pids))
    assert not Path(directory).exists()
    assert all(map(alive, other_pids))
    second.kill()
    assert second.wait(timeout=60) == -signal.SIGKILL
    assert eventually(lambda: not any(map(alive, other_pids)) and not reaper.processes_of(other))
    assert eventually(lambda: not Path(other).exists())


def server(directory, name):
    """The pid of one of the servers of the Ray that has its files in a directory."""
    (pid,) = (p for p in reaper.processes_of(directory) if read(p, "comm").strip() == name)
    return pid


def test_a_run_ends_in_time_with_its_own_code_when_rays_control_service_is_dead_or_hangs(start):
    done, hanging, waiting = start(), start("impatient"), start("waiting")
    (directory, pids), (other, other_pids), (third, its_pids) = map(directory_and_pids, (done, hanging, waiting))
    # The raylet has to reach the service before it can read Ray's settings there.
    environment = Path(f"/proc/{server(third, 'raylet')}/environ").read_text().split("\0")
    assert f"{VARIABLE}=3900" in environment
    for run in (directory, third):
        os.kill(server(run, "gcs_server"), signal.SIGKILL)
    os.kill(server(other, "gcs_server"), signal.SIGSTOP)
    hanging.send_signal(signal.SIGTERM)
    assert (done.wait(timeout=60), done.stderr.read()) == (0, "")
    assert hanging.wait(timeout=60) == 143
    first, last = hanging.stderr.read().splitlines()
    assert contains_in_order(first, "GPUs", "2 s")
    assert last == "stopped by SIGTERM"
    assert waiting.wait(timeout=60) == 1
    *_, last = waiting.stderr.read().splitlines()
    assert contains_in_order(last, "failed: ", "(GCS)")
    shutil.rmtree(third)  # the logs of a run that failed
    assert not Path(directory).exists()
    assert not Path(other).exists()
    assert not any(map(alive, pids + other_pids + its_pids))
    assert not reaper.processes_of(directory) + reaper.processes_of(other) + reaper.processes_of(third)


def test_workers_of_a_head_outlive_its_control_service_so_that_a_run_can_save(start):
    """`ray start --block` would have ended them with it."""
    directory = tempfile.mkdtemp(prefix="gkd-t-", dir="/tmp")
    ports = free_port(), free_port()

    def node(*arguments):
        command = [sys.executable, "-m", "gkd.cli.launch.node", *arguments]
        variables = {**os.environ, "GKD_RAY_DIR": directory}
        return subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
        )

    head = ["head", "--port", str(ports[0]), "--dashboard-port", str(ports[1]), "--simulate-gpus", "2"]
    try:
        up = node(*head)
        assert up.returncode == 0, up.stderr
        address = re.search(r"worker --address (\S+)", up.stdout)[1]
        run = start("joined", RAY_ADDRESS=address)
        _, pids = directory_and_pids(run)
        os.kill(server(directory, "gcs_server"), signal.SIGKILL)
        time.sleep(3.0)
        assert all(map(alive, pids))
        assert run.wait(timeout=60) == 1
        *_, last = run.stderr.read().splitlines()
        assert last.startswith(f"failed: Ray's control service (GCS) at {address} is gone")
        again = node(*head)
        assert again.returncode == 2
        assert "./launch/ray_cluster.sh stop" in again.stderr
    finally:
        stopped = node("stop")
        left = reaper.processes_of(directory)
        shutil.rmtree(directory)
    assert len(re.findall(r"\bstopped\b.*\bhead\b", stopped.stdout)) == 1, stopped.stdout + stopped.stderr
    assert not left
    assert not any(map(alive, pids))


@pytest.mark.parametrize(("moment", "delay_s"), [("starting", 2.0), ("disconnected", 0.0)])
def test_nothing_is_left_when_ctrl_c_comes_while_ray_starts(start, moment, delay_s):
    run = start(moment)
    directory, _ = directory_and_pids(run)
    time.sleep(delay_s)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 130
    assert run.stderr.read() == "stopped by Ctrl-C\n"
    assert reaper.processes_of(directory) == []
    assert not Path(directory).exists()


@pytest.mark.parametrize(("moment", "delay_s"), [("starting", 0.3), ("connecting", 0.0), ("busy", 0.1)])
def test_sigterm_has_its_line_and_code_while_ray_starts(start, moment, delay_s):
    """Ray puts handlers of its own in place: one that exits with 15 and, as it connects, one that aborts.

    That one does so three seconds later where the machine is too busy to have connected by then, which holds Python up.
    """
    for _ in range(4):
        run = start(moment)
        directory, _ = directory_and_pids(run)
        time.sleep(delay_s)
        run.send_signal(signal.SIGTERM)
        if (code := run.wait(timeout=60)) != -signal.SIGABRT:
            break
        assert eventually(lambda directory=directory: reaper.processes_of(directory) == [])
        shutil.rmtree(directory)
    assert code == 143
    assert run.stderr.read().splitlines()[-1] == "stopped by SIGTERM"  # below a stack where another thread had it
    assert reaper.processes_of(directory) == []
    assert not Path(directory).exists()


def test_a_ray_that_hangs_while_it_starts_ends_the_run_in_time(start):
    run = start("hanging")
    directory, _ = directory_and_pids(run)
    assert run.wait(timeout=60) == 1
    assert contains_in_order(run.stderr.read(), "failed: ", "Ray", " 1 s")
    assert eventually(lambda: not reaper.processes_of(directory) and not Path(directory).exists())


def test_only_writers_below_the_directory_are_found(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    with log.open("a") as out, log.open() as read:
        writer = subprocess.Popen(["sleep", "60"], stdout=out)
        reader = subprocess.Popen(["sleep", "60"], stdin=read)
    try:
        assert eventually(lambda: reaper.processes_of(str(tmp_path)) == [writer.pid])
        assert reaper.end_all(str(tmp_path), grace_s=0) == []
        assert writer.wait(timeout=60) == -signal.SIGKILL
        assert reader.poll() is None
    finally:
        writer.kill()
        reader.kill()


def test_a_directory_into_which_something_is_written_while_it_is_removed_is_removed(tmp_path, monkeypatch):
    directory, rmtree = tmp_path / "run", shutil.rmtree
    directory.mkdir()
    late = iter([True, True])

    def write_late(path, **options):
        rmtree(path, **options)
        if next(late, False):
            directory.mkdir()
            (directory / "late").touch()

    monkeypatch.setattr(shutil, "rmtree", write_late)
    assert reaper.remove(str(directory))
    assert not directory.exists()


def test_a_directory_that_stays_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    monkeypatch.setattr(reaper, "REMOVE_S", 0.1)
    assert not reaper.remove(str(tmp_path))


@pytest.mark.parametrize("killed", ["nothing", "workers", "workers and watchdog"])
def test_named_semaphores_of_what_was_killed_are_removed_and_no_others(tmp_path, killed):
    """Of a process whose resource tracker is killed with it, also where nobody lives who has them mapped."""
    program = """
import multiprocessing, time
from multiprocessing import shared_memory
lock, memory = multiprocessing.get_context("spawn").Lock(), shared_memory.SharedMemory(create=True, size=8)
print("/dev/shm/sem." + lock._semlock.name[1:], "/dev/shm/" + memory.name, flush=True)
time.sleep(60)
"""

    def begin(directory):
        directory.mkdir()
        with (directory / "log").open("a") as log:
            run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=log, text=True)
        return run, [Path(name) for name in run.stdout.readline().split()]

    directory = tmp_path / "ended"
    (ended, its), (other, others) = begin(directory), begin(tmp_path / "other")
    watchdog = reaper.watch(str(directory))
    try:
        pids = reaper.processes_of(str(directory))
        assert len(pids) == 2  # the resource tracker is the other one
        assert all(name.exists() for name in its + others)
        if killed != "nothing":
            assert eventually(lambda: len(reaper.read_record(str(directory))) == len(its))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: not reaper.processes_of(str(directory)))
        if killed == "workers and watchdog":
            watchdog.kill()
            os.utime(directory, (0, 0))
            assert reaper.clear(str(tmp_path), "ended") == [str(directory)]
        else:
            watchdog.stdin.close()  # as it is when the driver is killed
            watchdog.wait(timeout=60)
        assert [name for name in its + others if name.exists()] == others
        assert not directory.exists()
    finally:
        for run in (ended, other, watchdog):
            run.kill()
            run.wait(timeout=60)
        reaper.end_all(str(tmp_path / "other"))
    assert not any(name.exists() for name in others)


def test_the_next_run_removes_what_a_killed_one_and_its_watchdog_left(tmp_path):
    names = ("dead", "alive", "kept", "new", "file")
    paths = {name: tmp_path / f"run-{name}" for name in names}
    for name in names[:-1]:
        paths[name].mkdir()
    paths["file"].write_text("")
    reaper.keep(str(paths["kept"]))
    held = reaper.claim(str(paths["alive"]))
    with (paths["dead"] / "log").open("a") as out:
        orphan = subprocess.Popen(["sleep", "60"], stdout=out)
    for name in names:
        if name != "new":
            os.utime(paths[name], (0, 0))
    (tmp_path / "run-link").symlink_to(paths["new"])
    assert reaper.clear(str(tmp_path), "run-") == [str(paths["dead"])]
    assert orphan.wait(timeout=60) == -signal.SIGKILL
    assert [name for name in names if not paths[name].exists()] == ["dead"]
    os.close(held)
    assert reaper.clear(str(tmp_path), "run-") == [str(paths["alive"])]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:9", "nothing answers"),
        ("nowhere.invalid:6379", "nothing answers"),
        ("ray://127.0.0.1:10001", "not Ray's"),
        ("http://127.0.0.1:8265", "not Ray's"),
        ("somewhere", "expected host:port"),
    ],
)
def test_an_address_that_cannot_be_is_one_line(address, expected):
    with pytest.raises(ConfigError, match=expected) as caught, connect(configuration(address=address)):
        pass
    assert str(caught.value).startswith(f"cluster.address={address}: ")
    assert "\n" not in str(caught.value)


def test_an_address_that_takes_the_call_but_is_no_ray_is_one_line(monkeypatch):
    monkeypatch.setattr("gkd.cluster.session.address.CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        pattern = r"^RAY_ADDRESS=.*: what answers there is not a Ray"
        with pytest.raises(ConfigError, match=pattern), connect(configuration()):
            pass


def test_simulated_gpus_cannot_be_added_to_a_cluster():
    with pytest.raises(ConfigError, match="private Ray"), connect(configuration(address="a:1", simulate_gpus=3)):
        pass


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"simulate_gpus": 2}, "2 on 1 node"),
        ({"simulate_gpus": 2, "address": "local"}, "2 on 1 node"),
        ({"simulate_gpus": None}, "0 on 1 node.*cluster.simulate_gpus=3"),
        ({"simulate_gpus": 0}, "at least 1"),
        ({"simulate_gpus": "auto", "teacher": 9}, "cluster.simulate_gpus=11"),
        ({"simulate_gpus": "auto", "teacher": {"gpus": [8]}}, "teacher.gpus=8 is beyond .* GPUs 0-7"),
    ],
)
def test_what_does_not_fit_this_machine_ends_before_ray_starts(monkeypatch, settings, expected):
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    monkeypatch.setattr(gpu, "nvml_uuids", lambda: [])
    monkeypatch.setattr("gkd.cluster.session.connect._start_private", None)
    with pytest.raises(ConfigError, match=expected), connect(configuration(**settings)):
        pass


def test_ray_is_started_once_more_when_a_busy_machine_was_too_slow(monkeypatch, tmp_path):
    calls = []

    def too_slow(**settings):
        calls.append(settings)
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr("ray.init", too_slow)
    # Ray looks for a token once a process: with it this one would not be taken by the cluster of the tests to come.
    monkeypatch.setattr(session_module, "use_own_token", lambda: None)
    with pytest.raises(RunFailed, match=r"^Ray .*timed out"):
        session_module._start_private(str(tmp_path), 1, 1, True, reconnect_s=60.0)
    assert len(calls) == 2
    assert calls[0]["address"] == "local"
