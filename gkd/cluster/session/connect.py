"""A run's connection to Ray: a cluster that is there, or a private one on this machine that ends with the run."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._private.node import Node as RayNode
from ray._private.state import state  # Ray has no public way to read a cluster's own settings
from ray.util import remove_placement_group

from gkd.cluster import gpu
from gkd.cluster.layout.fit import require_fit, share_gpus
from gkd.cluster.layout.nodes import Node, group_requests
from gkd.cluster.session import local, reaper
from gkd.cluster.session.address import require_cluster, use_own_token
from gkd.cluster.session.control_service import SETTING, ControlService, finish_s
from gkd.cluster.session.shutdown import (
    abandon,
    defer_signals,
    end_unless_done,
    ignore_signals,
    init_ray,
    keep_exit_code,
    replace_attributes,
    run_within,
    shield_children_from_hangups,
)
from gkd.config import MAX_AUTO_SIMULATED_GPUS, Cluster, Config
from gkd.config.device import installed_device
from gkd.durable import reason
from gkd.errors import ConfigError, RunFailed, one_line

START_TIMEOUT_S = 180.0  # Ray itself gives up earlier on whatever it waits for with a deadline
RELEASE_TIMEOUT_S = 15.0
JOIN_S = 5.0
SHUTDOWN_TIMEOUT_S = 30.0
PREFIX = "gkd-run-"
LEAST_ROOM = 64 << 20  # bytes; with none, Ray waits for servers that cannot report that they are there
LONGEST_BASE = 26  # Ray puts Unix sockets up to 81 characters deeper, and their paths may have 107
RESTART_GRACE_S = 10.0
"""Time the control service of a cluster may be away: some clusters start it again. That of a private Ray is not."""
log = logging.getLogger("gkd")


@dataclass
class Session:
    """Everything that a run holds in Ray; :func:`connect` makes it and gives everything back."""

    directory: str | None = None
    """Directory of a private Ray, logs included; None when connected to a cluster."""
    workers: list[Any] = field(default_factory=list)
    placement_groups: list[Any] = field(default_factory=list)
    control: ControlService | None = None
    claim: int | None = None
    """The descriptor whose lock shows that the directory is in use."""
    threads: list[threading.Thread] = field(default_factory=list)
    """Threads that start workers beside the run; they end with these, and are waited for before Ray is left."""
    ended: bool = False

    def add(self, worker: Any) -> None:
        """Take in a worker that was just started. Raises RunFailed, and ends it, once the run has ended."""
        self.workers.append(worker)
        if self.ended:
            ray.kill(worker, no_restart=True)
            raise RunFailed("the run has ended")

    @property
    def joined_address(self) -> str | None:
        """``host:port`` of the cluster; None of a private Ray."""
        return None if self.directory is not None or self.control is None else self.control.address

    def require_control(self) -> None:
        """Raise ControlLost when Ray's control service is gone, once."""
        if self.control is not None:
            self.control.require()

    def release(self, workers: Sequence[Any], placement_groups: Sequence[Any]) -> None:
        """Kill these workers and give their reservations back, unless that was done before."""
        for worker in workers:
            ray.kill(worker, no_restart=True)
            with contextlib.suppress(ValueError):  # who started it gave it back as well
                self.workers.remove(worker)
        for group in placement_groups:
            if group in self.placement_groups:
                remove_placement_group(group)
                self.placement_groups.remove(group)


@contextlib.contextmanager
def connect(config: Config) -> Iterator[Session]:
    """Connect to Ray for a run, and on the way out, however that is, leave nothing of the run behind.

    ``cluster.address`` or RAY_ADDRESS names a cluster; without them it is the one that launch/ray_cluster.sh started
    here, if it did. A number of ``cluster.simulate_gpus``, the address ``local``, or no cluster mean a private one. A
    process that is connected already keeps its connection. Raises ConfigError for an address that does not answer, and,
    before Ray starts, for a layout that this machine cannot hold.
    """
    with keep_exit_code():
        yield from _connect(config)


def _connect(config: Config) -> Iterator[Session]:
    session = Session()
    watchdog: subprocess.Popen[bytes] | None = None
    connected_before = ray.is_initialized()
    try:
        if not connected_before:
            address = run_address(config.cluster)
            if address is not None:
                if address == local.find_running_address():
                    log.info("joining the Ray cluster at %s (cluster.address=local for a private one)", address)
                named = config.cluster.address is None and "RAY_ADDRESS" in os.environ
                join(address, "RAY_ADDRESS" if named else "cluster.address")
            else:
                start = _plan_private(config)
                session.directory = _new_directory()
                session.claim = reaper.claim(session.directory)
                watchdog = reaper.watch(session.directory)
                _start_private(session.directory, *start, reconnect_s=_sum_timeouts_s(config))
        grace_s = RESTART_GRACE_S if session.directory is None else 1.5
        time_left_s = finish_s(state.get_system_config(), config.trainer.save_timeout_s)
        session.control = ControlService(ray.get_runtime_context().gcs_address, grace_s, time_left_s)
        yield session
    except BaseException as error:
        # Logs of the workers are worth keeping only where something in them may explain the failure.
        keep = not isinstance(error, ConfigError | KeyboardInterrupt | SystemExit | GeneratorExit)
        _close(session, connected_before, watchdog, keep_logs=keep)
        raise
    else:
        _close(session, connected_before, watchdog, keep_logs=False)


def _sum_timeouts_s(config: Config) -> int:
    """Return time that a run without a control service may need to finish a step and to write a checkpoint."""
    return math.ceil(config.trainer.update_timeout_s + config.weights.timeout_s + config.trainer.save_timeout_s)


def run_address(cluster: Cluster) -> str | None:
    """Return ``host:port`` (or ``auto``) of the cluster that a run joins; None for a private Ray.

    Raises ConfigError where both are named.
    """
    simulate = isinstance(cluster.simulate_gpus, int)
    if cluster.address not in (None, "local") and simulate:
        raise ConfigError(
            f"cluster.simulate_gpus is for a private Ray: it cannot add GPUs to cluster.address={cluster.address}"
        )
    if simulate:  # the command line outweighs the environment
        return None
    return cluster_address(cluster.address)


def cluster_address(setting: str | None) -> str | None:
    """Return ``host:port`` (or ``auto``) of the cluster that an address, or None, means; None for a private Ray."""
    address = setting or os.environ.get("RAY_ADDRESS")
    if address and address != "auto":
        return None if address == "local" else address
    return local.find_running_address() or address or None


def join(address: str, setting: str = "cluster.address") -> None:
    """Connect to a running cluster, or raise ConfigError naming ``setting``."""
    if address != "auto":
        require_cluster(address, setting)
    try:
        with end_unless_done(START_TIMEOUT_S, f"joining the Ray cluster at {address}"):
            init_ray(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise ConfigError(
                f"{setting}=auto: Ray finds no cluster here; ./launch/ray_cluster.sh head starts one"
            ) from error
        raise ConfigError(f"{setting}={address}: cannot join this cluster: {one_line(error)}") from error


def _plan_private(config: Config) -> tuple[int, int, bool]:
    """Return GPUs and CPUs of a private Ray, and whether the GPUs are simulated. Raises ConfigError for too few."""
    cluster = config.cluster
    local.require_limits()
    # GPUs that the installed packages cannot compute on are as good as none.
    on_cpu = isinstance(cluster.simulate_gpus, int) or (cluster.simulate_gpus == "auto" and installed_device() == "cpu")
    uuids = [] if on_cpu else gpu.nvml_uuids()
    n_gpus, simulated, hint = len(gpu.usable_devices(os.environ.get(gpu.VISIBLE), uuids)), False, ""
    for_layout = cluster.simulate_gpus == "auto" and not n_gpus
    if isinstance(cluster.simulate_gpus, int):
        if cluster.simulate_gpus < 1:
            raise ConfigError(f"cluster.simulate_gpus={cluster.simulate_gpus}: at least 1, auto, or null for real GPUs")
        n_gpus, simulated = cluster.simulate_gpus, True
    requests = group_requests(config)
    named = [index for request in requests for gpus in request.ranges for index in gpus]
    n_gpus_needed = max(sum(request.total for request in requests), *(index + 1 for index in [-1, *named]))
    if for_layout:
        n_gpus, simulated = min(n_gpus_needed, MAX_AUTO_SIMULATED_GPUS), True
        if n_gpus_needed > n_gpus:
            hint = f"cluster.simulate_gpus={n_gpus_needed} would simulate them all"
    elif not n_gpus:
        hint = f"cluster.simulate_gpus={n_gpus_needed} tries the layout without GPUs"
    requests = group_requests(share_gpus(config, [_local_node(n_gpus, 0, simulated, uuids)]))
    workers = sum(request.workers_per_node * request.nnodes for request in requests)
    # Of a machine that is this run's, Ray only counts the cores: three workers on one GPU share two as well.
    n_cpus = max(os.cpu_count() or 1, math.ceil(workers * cluster.cpus_per_worker))
    require_fit(requests, [_local_node(n_gpus, n_cpus, simulated, uuids)], cluster.cpus_per_worker, hint)
    return n_gpus, n_cpus, simulated


def _local_node(n_gpus: int, n_cpus: int, simulated: bool, uuids: list[str]) -> Node:
    """Return the one node of a private Ray."""
    visible = None if simulated and not _lists_enough(n_gpus) else os.environ.get(gpu.VISIBLE)
    return Node("", "this machine", tuple(gpu.node_indices(visible, n_gpus, uuids)), n_cpus)


def _lists_enough(n_gpus: int) -> bool:
    """Return whether simulated GPUs can take their ids from the parent's CUDA_VISIBLE_DEVICES."""
    entries = gpu.parse_visible_devices(os.environ.get(gpu.VISIBLE)) or []
    return len(entries) >= n_gpus and all(token.isdigit() for token in entries)


def _start_private(directory: str, n_gpus: int, n_cpus: int, simulated: bool, *, reconnect_s: int) -> None:
    """Start Ray on free ports with its files in ``directory``, in the main thread: it dies with the starting thread.

    Its processes live for ``reconnect_s`` without their control service.
    """
    use_own_token()
    environment: dict[str, str | None] = {
        **local.server_variables(reconnect_s),
        gpu.SIMULATED: "1" if simulated else None,
    }
    # Ray refuses more GPUs than the variable lists; when it lists enough, ids are taken from it.
    if simulated and not _lists_enough(n_gpus):
        environment[gpu.VISIBLE] = None
    for attempts_left in (1, 0):
        try:
            with (
                _environment(environment),
                start_needed_servers_only(),
                shield_children_from_hangups(),
                start_servers_in_own_groups(),
                end_unless_done(START_TIMEOUT_S, "starting Ray"),
            ):
                init_ray(
                    address="local",
                    num_gpus=n_gpus,
                    num_cpus=n_cpus,
                    include_dashboard=False,
                    _temp_dir=directory,
                    _system_config={SETTING: reconnect_s},
                )
            return
        except Exception as error:  # Ray raises bare Exception, too, when its servers need more than 30 s
            if not attempts_left:
                raise RunFailed(f"Ray did not start: {one_line(error)}") from error
            log.warning("Ray did not start, trying once more: %s", one_line(error))
            reaper.end_all(directory, grace_s=0)
            with contextlib.suppress(Exception):  # of what is gone
                run_within(SHUTDOWN_TIMEOUT_S, "ending Ray", ray.shutdown)


@contextlib.contextmanager
def start_needed_servers_only() -> Iterator[None]:
    """Have Ray start without three servers that a private one has no use for; they take as long as all others do.

    They are the dashboard's, which start also where there is to be none, the autoscaler, and the one that prints what
    workers print. Ray has no settings for that.
    """

    def skip_dashboard(node: Any, **_: Any) -> None:
        node._webui_url = ""

    others = dict.fromkeys(("start_monitor", "start_log_monitor"), lambda _: None)
    with replace_attributes(RayNode, start_api_server=skip_dashboard, **others):
        yield


def _new_directory() -> str:
    ray_base = os.environ.get("RAY_TMPDIR") or ("/tmp" if os.access("/tmp", os.W_OK) else None)
    variable, base = "RAY_TMPDIR" if ray_base else "TMPDIR", str(Path(ray_base or tempfile.gettempdir()).absolute())
    if len(base) > LONGEST_BASE:
        raise ConfigError(f"{variable}={base}: at most {LONGEST_BASE} characters; Ray's sockets go below it")
    for path in reaper.clear(base, PREFIX):
        log.info("removed %s of a run that was killed", path)
    try:
        if (free := shutil.disk_usage(base).free) < LEAST_ROOM:
            raise ConfigError(f"{variable}={base}: {free >> 20} MiB free, Ray needs {LEAST_ROOM >> 20} for its files")
        return tempfile.mkdtemp(prefix=PREFIX, dir=base)
    except OSError as error:
        raise ConfigError(f"{variable}={base}: {reason(error)}") from None


def _close(session: Session, connected_before: bool, watchdog: subprocess.Popen[bytes] | None, keep_logs: bool) -> None:
    """Give back everything. Every part has a deadline, and a second Ctrl-C does not interrupt it."""
    with ignore_signals():
        lost = session.control is not None and session.control.is_lost
        if session.control is not None:
            session.control.close()
        if ray.is_initialized():
            _leave_ray(session, lost, stay=connected_before)
        elif session.directory is not None:
            # Interrupted before it was connected: what Ray does of this at the program's end writes into the directory.
            run_within(SHUTDOWN_TIMEOUT_S, "ending Ray", ray.shutdown)
        if session.directory is None:
            return
        alive = reaper.end_all(session.directory)
        if alive:
            log.warning("processes that would not end: %s", ", ".join(map(str, alive)))
        if watchdog is not None:  # first, as it writes into the directory
            reaper.dismiss(watchdog)
        if keep_logs:
            reaper.keep(session.directory)
            log.warning("logs of the workers: %s/session_latest/logs", session.directory)
        elif not reaper.remove(session.directory):
            log.warning("%s could not be removed", session.directory)
        if session.claim is not None:
            os.close(session.claim)


def _leave_ray(session: Session, lost: bool, stay: bool) -> None:
    """Give back what a run has of Ray and, unless it is to ``stay``, disconnect.

    Where the control service is ``lost`` or does not answer there is nobody to give anything back to, and
    disconnecting would wait for it.
    """
    session.ended = True

    def release() -> None:
        # A cluster that is gone has nothing to give back, and the error that matters is on its way already.
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
            workers = list(session.workers)
            if session.directory is None and workers:  # of a private Ray all is ended and removed afterwards
                ray.wait([each.end_children.remote() for each in workers], num_returns=len(workers), timeout=JOIN_S)
            session.release(workers, list(session.placement_groups))
        deadline = time.monotonic() + JOIN_S
        for thread in session.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    if lost or not run_within(RELEASE_TIMEOUT_S, "giving workers and GPUs back", release):
        abandon("disconnecting from Ray")
    elif not stay:
        run_within(SHUTDOWN_TIMEOUT_S, "disconnecting from Ray", ray.shutdown)


@contextlib.contextmanager
def start_servers_in_own_groups() -> Iterator[None]:
    """Have Ray's servers end with the run and not with its group of processes.

    ``timeout`` and a shell's ``kill %1`` send SIGTERM to the whole group, and a run needs Ray for its last checkpoint.
    Ray starts them with a ``preexec_fn``.
    """
    start: type[subprocess.Popen[Any]] = services.ConsolePopen

    def start_in_own_group(*args: Any, **kwargs: Any) -> subprocess.Popen[Any]:
        with defer_signals():
            return start(*args, process_group=0, **kwargs)

    with replace_attributes(services, ConsolePopen=start_in_own_group):
        yield


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Set variables for the processes that Ray starts, None to leave one out; this process gets its own back."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
