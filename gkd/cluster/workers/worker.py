"""The one Ray actor class of every group: takes its device before anything imports torch, then hosts the real worker.

Ray starts a :class:`Worker` in every reserved bundle. It reports which device it has; only when all reports are right
does it import and build what the group needs, named by a string, so that neither the driver nor this module imports
torch or vLLM.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import psutil
import ray

from gkd.cluster.gpu import VISIBLE, read_memory, visible_devices
from gkd.cluster.layout.assignment import DeviceReport
from gkd.cluster.session import reaper
from gkd.cluster.session.port import free_port
from gkd.cluster.workers.environment import allocate_by
from gkd.cluster.workers.heap import freeze_heap, pause_garbage_collection
from gkd.errors import ConfigError, RunFailed

# "main" has one thread, always the same: torch's thread pools, CUDA contexts and vLLM belong to the thread that made
# them. "control" stays free for pings, aborts and queue submissions while "main" is busy.
# Senders wait for buckets of weights to be loaded: two of every rank that shares GPUs with an engine.
CONCURRENCY_GROUPS = {"main": 1, "control": 8, "stream": 4, "weights": 32}


@contextmanager
def keep_trace() -> Iterator[None]:
    """Print the traceback of an error that nobody has thought of into this process' log; the driver prints a line."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ConfigError | RunFailed):
            traceback.print_exc()
        raise


def end_family(pid: int, itself: bool = True) -> None:
    """Kill what process ``pid`` has started, and it, and remove what they share by name, which outlives a kill."""
    pids = [child.pid for child in psutil.Process(pid).children(recursive=True)] + [pid] * itself
    reaper.end(lambda: list(filter(reaper.is_running, pids)), 0.0, reaper.list_shared_memory([pid]))


class Worker:
    """One process with one GPU. ``ray.remote`` it with :data:`CONCURRENCY_GROUPS`."""

    def __init__(self) -> None:
        # Raising here would reach the driver as a death with a traceback for a message, so report() raises instead.
        self._torch_came_first = "torch" in sys.modules
        self._ray_gpu_ids = sorted(str(gpu) for gpu in ray.get_gpu_ids())
        # Ray leaves the variable alone under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; NVML counts in PCI order.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ[VISIBLE] = ",".join(self._ray_gpu_ids)
        self._object: Any = None

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def report(self) -> DeviceReport:
        """Return what this process sees. Raises RunFailed when torch was imported before the device was chosen."""
        if self._torch_came_first:
            raise RunFailed(f"pid {os.getpid()}: torch was imported before {VISIBLE} was set, so it may use any GPU")
        context = ray.get_runtime_context()
        visible = os.environ[VISIBLE]
        devices = visible_devices(visible, context.get_node_id())
        memory = read_memory(devices.uuids)
        return DeviceReport(
            node_id=context.get_node_id(),
            ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            cuda_visible_devices=visible,
            ray_gpu_ids=self._ray_gpu_ids,
            gpu_uuids=devices.uuids,
            gpu_indices=devices.indices,
            gpu_bytes=None if memory is None else memory[0],
            gpu_used=0 if memory is None else memory[1],
        )

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables, e.g. OMP_NUM_THREADS, which Ray sets to 1. Before :meth:`build`."""
        self._require_unbuilt("set_environment")
        os.environ.update(variables)
        allocate_by(variables)

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def set_visible_devices(self, devices: Sequence[str], on_several_nodes: bool) -> None:
        """Make this worker see all ``devices`` that its engine has on this node. After the check, before :meth:`build`.

        ``on_several_nodes``: the engine has parts elsewhere, which reach this one at the node's address.
        """
        self._require_unbuilt("set_visible_devices")
        reaper.watch_family()  # of the processes that the engine's other GPUs get
        os.environ[VISIBLE] = ",".join(devices)
        if on_several_nodes:
            os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def free_port(self) -> int:
        """Return a port that was free on this node a moment ago."""
        return free_port()

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def build(self, target: str, *args: Any) -> None:
        """Import ``package.module:Class`` and construct the object whose methods :meth:`call` reaches."""
        self._require_unbuilt("build")
        module, _, name = target.partition(":")
        with keep_trace(), pause_garbage_collection():
            self._object = getattr(importlib.import_module(module), name)(*args)
        freeze_heap()
        self._require_own_gpu()

    def _require_own_gpu(self) -> None:
        """Raise RunFailed when torch, once it uses a GPU, uses another one than was reported."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        used = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        uuids = visible_devices(os.environ[VISIBLE], ray.get_runtime_context().get_node_id()).uuids
        if not any(used in uuid for uuid in uuids) and not any(uuid.startswith("MIG-") for uuid in uuids):
            raise RunFailed(f"pid {os.getpid()}: torch computes on GPU {used} instead of {', '.join(uuids)}")

    @ray.method(concurrency_group="main")  # type: ignore[untyped-decorator]
    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object, or of a part of it (``part.method``), on the thread that built it, after all
        earlier calls.
        """
        with keep_trace():
            return self._method(method)(*args)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def control(self, method: str, *args: Any) -> Any:
        """Call a method of the object at once, on another thread, also while :meth:`call` is busy."""
        with keep_trace():
            return self._method(method)(*args)

    @ray.method(concurrency_group="weights")  # type: ignore[untyped-decorator]
    def load_bucket(self, *args: Any) -> Any:
        """Call the object's ``weights.load_bucket``, which waits until a bucket of new weights is loaded."""
        with keep_trace():
            return self._method("weights.load_bucket")(*args)

    @ray.method(concurrency_group="stream", num_returns="streaming")  # type: ignore[untyped-decorator]
    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Yield what a generator method of the object yields, each item as soon as it is there."""
        with keep_trace():
            yield from self._method(method)(*args)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def block_until_end(self) -> None:
        """Block for as long as this process lives, so that others can watch it with :meth:`end_after_any`."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def end_children(self) -> None:
        """End what this process has started, and leave nothing that it shares with that; before Ray kills this one."""
        end_family(os.getpid(), itself=False)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def end_after_any(self, calls: Sequence[Any]) -> None:
        """End this process and its children as soon as one of these calls of other workers ends, as it does on failure.

        An engine that lost a part waits for it in a collective, where nothing but its own end would be noticed; its
        children wait there too, and do not look whether this process is still there.
        """

        def watch() -> None:
            try:
                ray.wait(list(calls), num_returns=1, timeout=None)  # for as long as the engine lives
                end_family(os.getpid(), itself=False)
            finally:  # whatever went wrong: unwatched, it might wait for ever
                os._exit(1)

        threading.Thread(target=watch, name="other-parts", daemon=True).start()

    def _method(self, name: str) -> Any:
        if self._object is None:
            raise RunFailed(f"{name} was called before the worker was built")
        try:
            return attrgetter(name)(self._object)
        except AttributeError:  # such as a rank's state, which comes with the student
            raise RunFailed(f"{name} was called, which the worker has not, or not before it is loaded") from None

    def _require_unbuilt(self, activity: str) -> None:
        if self._object is not None:
            raise RunFailed(f"{activity} came after the worker was built")
