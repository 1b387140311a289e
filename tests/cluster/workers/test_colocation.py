"""Who is on shared GPUs, and which groups may start at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.colocation import Colocation
from gkd.cluster.workers.group import Group
from gkd.driver import startup
from gkd.driver.startup import waves


@dataclass
class Member:
    """Keeps what it has on its GPU, and refuses what makes no sense."""

    held: str = "all"
    name: str = ""
    turns: list[str] = field(default_factory=list)
    """Of all members, what each holds from then on."""

    def sleep(self) -> None:
        assert self.held != "nothing"
        self._hold("nothing")

    def wake(self, weights_only: bool = False) -> None:
        assert self.held != "all"
        self._hold("weights" if weights_only else "all")

    def _hold(self, what: str) -> None:
        self.held = what
        self.turns.append(f"{self.name} {what}")

    def offload(self) -> None:
        self.sleep()

    def onload(self) -> None:
        self.wake()


@dataclass
class Trio:
    """An actor that is not loaded yet, and engines that are."""

    actor: Member = field(default_factory=lambda: Member("nothing"))
    sampler: Member = field(default_factory=Member)
    scorer: Member = field(default_factory=Member)

    @property
    def held(self) -> tuple[str, str, str]:
        return self.actor.held, self.sampler.held, self.scorer.held


WANTED = {
    "wake_engines": ("nothing", "all", "all"),
    "onload_actor": ("all", "nothing", "nothing"),
    "prepare_push": ("all", "weights", "nothing"),
}


@given(st.lists(st.sampled_from(sorted(WANTED)), max_size=8))
def test_who_works_is_on_the_gpus_and_nobody_else(calls: list[str]) -> None:
    trio = Trio()
    colocation = Colocation(trio.actor, [trio.sampler], [trio.scorer])
    for call in calls:
        getattr(colocation, call)()
        assert trio.held == WANTED[call]


def test_memory_is_freed_before_others_take_it() -> None:
    """One group after the other: vLLM fails where the GPU's free memory shrinks while it goes to sleep."""
    turns: list[str] = []
    actor, sampler, *scorers = (
        Member("nothing" if name == "actor" else "all", name, turns)
        for name in ("actor", "sampler", "teacher", "reference")
    )
    colocation = Colocation(actor, [sampler], scorers)
    engines_sleep = ["sampler nothing", "teacher nothing", "reference nothing"]
    engines_wake = ["actor nothing", "sampler all", "teacher all", "reference all"]
    for prepare, expected in (
        (colocation.prepare_push, [*engines_sleep, "actor all", "sampler weights"]),
        (colocation.onload_actor, ["sampler nothing"]),
        (colocation.wake_engines, engines_wake),
        (colocation.onload_actor, [*engines_sleep, "actor all"]),
        (colocation.prepare_push, ["sampler weights"]),
        (colocation.wake_engines, engines_wake),
    ):
        turns.clear()
        prepare()
        assert turns == expected


def group(name: str, *uuids: str) -> Group:
    reports = [
        Report(
            node_id="n", ip="10.0.0.1", pid=1, cuda_visible_devices="0", ray_gpu_ids=["0"],
            gpu_uuids=[uuid], gpu_indices=[0], group=name, rank=rank, node="n",
        )
        for rank, uuid in enumerate(uuids)
    ]  # fmt: skip
    return Group(name, tuple(uuids), tuple(reports))


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ({"actor": "a", "rollout": "b", "teacher": "c"}, [["actor", "rollout", "teacher"]]),
        ({"actor": "a", "rollout": "a", "teacher": "a"}, [["actor", "rollout"], ["teacher"]]),
        (
            {"actor": "a", "rollout": "b", "teacher": "b", "reference": "a"},
            [["actor", "rollout", "reference"], ["teacher"]],
        ),
    ],
)  # fmt: skip
def test_engines_on_one_gpu_start_one_after_the_other(on: dict[str, str], expected: list[list[str]]) -> None:
    assert waves({name: group(name, f"GPU-{gpu}") for name, gpu in on.items()}) == expected
    # On simulated GPUs there is nothing that vLLM could measure.
    assert waves({name: group(name, f"SIM-{gpu}") for name, gpu in on.items()}) == [list(on)]


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ({"actor": "a", "rollout": "b", "teacher": "c"}, [["actor"], ["rollout", "teacher", "load"]]),
        ({"actor": "a", "rollout": "b", "teacher": "b"}, [["actor"], ["rollout"], ["teacher", "load"]]),
        ({"actor": "a", "rollout": "b", "teacher": "a"}, [["actor", "rollout", "teacher"]]),
        ({"actor": "a", "rollout": "a", "teacher": "a"}, [["actor", "rollout"], ["teacher"]]),
    ],
)  # fmt: skip
def test_the_student_is_read_beside_engines_that_are_on_other_gpus(
    on: dict[str, str], expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each wait is for. On shared GPUs it is read when engines that are to sleep do."""
    waits: list[Any] = []
    monkeypatch.setattr(startup, "gather", lambda calls, limit, announce_s: waits.append(list(calls)))
    builds: Any = {name: lambda name=name: [name] for name in on}
    actor: Any = SimpleNamespace(submit_load=lambda: "load")
    groups = {name: group(name, f"GPU-{gpu}") for name, gpu in on.items()}
    is_loaded = startup._build_workers(builds, groups, actor, 60.0)
    assert waits == expected and is_loaded == any("load" in wait for wait in expected)
