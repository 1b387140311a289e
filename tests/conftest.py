"""Tiers of tests, by folder; the processes that run them; and the Ray that several rooms share.

tests/ray, tests/vllm and tests/e2e hold what starts Ray, a vLLM engine, or other programs, and are run with ``--all``,
with ``-m``, or where they are named. All other tests are the fast tier, in which starting any of these fails.
"""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing.process
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

gc.disable()  # until all tests are collected: what imports make stays, and searching it is a fifth of their time
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as Ray's workers in runs
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # likewise
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported; see gkd.inference
# What inductor makes of a graph is compared; finding out by compiling for which vector units takes longer than that.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

for number in (signal.SIGINT, signal.SIGHUP):  # `nohup` and `&` have programs ignore them, those of the tests too
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# A busy machine is not a failure.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

HERE = Path(__file__).parent
TIERS = ("ray", "vllm", "e2e")


def tier(path: Path) -> str | None:
    """Name the tier of a test file, None for the fast one."""
    folder = path.relative_to(HERE).parts[0]
    return folder if folder in TIERS else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests/ray, tests/vllm and tests/e2e")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the slow tiers out; pytest does not ask about folders that are named in its arguments."""
    slow = collection_path.parent == HERE and collection_path.name in TIERS
    return True if slow and not (config.getoption("all") or config.option.markexpr) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    name = tier(item.path)
    if name is not None:
        item.add_marker(name)


# Lanes: tests that share a Ray, engines, or models made for them, in the order in which they begin. Those of
# ray/cluster have their process' connection to Ray for themselves. Other files are lanes of their own: those that start
# programs, and at the end those of the fast tier, which keep all processes busy: files that take longest come first.
LIBRARY = "library"
LANES = ("ray/cluster", LIBRARY, "e2e/on_a_cluster")
LONGEST = ("planning/", "config/", "scoring/", "actor/", "rewards/test_judge", "observability/test_trackers", "test_")


def lane(nodeid: str) -> str:
    """Name the lane of a test."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    for name in ("ray/cluster", "e2e/on_a_cluster"):
        if file.startswith(f"{name}/"):
            return name
    return LIBRARY if file.startswith(("ray/", "vllm/")) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(LANES)}

    def place(item: pytest.Item) -> tuple[int, bool]:
        file = lane(item.nodeid)
        return order.get(file, len(LANES) + (tier(item.path) is None)), not file.startswith(LONGEST)

    items.sort(key=place)


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes end at once: nobody waits for what imports have made to be taken apart."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # registered before those of what is imported, and so done after them


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what is there for good, such as torch, out of every later garbage collection.

    And have all of torch's loggers propagate: to each of the fifty that do not, pytest adds handlers for every test. In
    the fast tier torch computes on one core, as the other processes do; vLLM has as many threads as it began with.
    """
    if "torch" in sys.modules and all(tier(item.path) is None for item in session.items):
        sys.modules["torch"].set_num_threads(1)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # what tests make goes without it, and searching is a twentieth of their time
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # those end at once, and pytest has little to search before
        gc.unfreeze()  # the interpreter ends with a collection, for which compiled extensions wait


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes one lane after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Return the test in which a process died, which has failed; what else it was to do is for others."""
            lanes = self.assigned_work.pop(node)
            left = {name: [test for test, done in tests.items() if not done] for name, tests in lanes.items()}
            died_in = next((test for tests in left.values() for test in tests), None)
            for name, tests in left.items():
                if unfinished := dict.fromkeys((test for test in tests if test != died_in), False):
                    self.workqueue[name] = unfinished
            self._give_out()
            return died_in

        def schedule(self) -> None:
            super().schedule()
            self._give_out()  # a process begins with a test once it has the next one, or knows that there is none

        def _give_out(self) -> None:
            for node in self.nodes:
                self._reschedule(node)

    config.option.loadscopereorder = False
    return Lanes(config, log)


class NoVllm:
    """Refuses to import vLLM."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "vllm":
            refuse("imports vLLM", "vllm")
        return None


def refuse(what: str, where: str) -> NoReturn:
    pytest.fail(f"a test of the fast tier {what}: it belongs into tests/{where}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the fast tier that starts a process (as Ray does) or imports vLLM."""
    if tier(item.path) is not None:
        return (yield)

    def popen(_: object, args: object = None, *more: object, **options: object) -> None:
        refuse(f"starts {args or options.get('args')}", "e2e")

    def start(process: multiprocessing.process.BaseProcess) -> None:
        refuse(f"starts {process.name}", "e2e")

    platform.processor()  # remembered from here on; openai asks, and it is another program that answers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", popen)
        patch.setattr(multiprocessing.process.BaseProcess, "start", start)
        patch.setattr(sys, "meta_path", [NoVllm(), *sys.meta_path])
        return (yield)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this test run's own with eight simulated GPUs."""
    import ray

    from gkd.cluster.session.connect import start_needed_servers_only

    with start_needed_servers_only():
        ray.init(
            address="local", num_cpus=8, num_gpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
    yield
    ray.shutdown()
