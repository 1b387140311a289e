"""What models that score are built from when they are started again, and what their clients are made with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gkd.cluster.workers.group
import gkd.driver.groups.scorers
from gkd.cluster.health.watched import RestartPolicy
from gkd.cluster.workers.group import Group
from gkd.config import Config, load
from gkd.driver.groups.scorers import Scorers
from gkd.driver.inputs.find import Inputs, find_inputs
from gkd.scoring.address import Key
from gkd.scoring.worker import ScorerSpec, _engine_spec
from tests.data.models import WORDS, save_model
from tests.weights.reports import reports

ROWS = {"student": 14, "math": 12, "code": 16}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two teachers of the student's tokenizer, with other numbers of rows that no token has."""
    paths = {name: str(save_model(tmp_path / name, rows)) for name, rows in ROWS.items()}
    rows = [{"prompt": "a b", "teacher": name} for name in ("math", "code")]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(
        {
            "model": {"path": paths.pop("student")},
            "teacher": {"models": paths, "n_gpus_per_node": 2},
            "data": {"train_files": [str(file)], "val_files": [str(file)], "teacher_key": "teacher"},
            "algorithm": {"loss": {"top_k": None}},
            "rollout": {"engine": "hf"},
        }
    )


def arguments(config: Config, inputs: Inputs, model: str) -> dict[str, object]:
    return Scorers(config, inputs, Key.generate(), {})._arguments(model, ["tcp://127.0.0.1:1"], 1)


def test_teachers_of_different_rows_score_those_that_all_have(config: Config) -> None:
    """So that all give the same K, also where that is the whole vocabulary; each is named in messages."""
    inputs = find_inputs(config, print)
    assert min(ROWS.values()) > len(WORDS)
    for name in ("teacher:math", "teacher:code"):
        made = arguments(config, inputs, name)
        assert (made["vocabulary"], made["scorer"]) == (min(ROWS.values()), name)
    assert arguments(config, inputs, "reference")["vocabulary"] == ROWS["student"]


@pytest.mark.parametrize(("gpu", "size"), [("GPU-3", 13), ("GPU-7", None)], ids=["on its GPU", "on another one"])
def test_a_replica_that_is_started_again_has_the_cache_of_before(
    gpu: str, size: int | None, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would measure beside an actor at work is not what it may have. Of two teachers four engines."""

    class Played(Group):
        def control(self, *_: Any, **__: Any) -> list[Any]:
            return [10, 11, 12, 13]

    built: list[tuple[Any, ScorerSpec]] = []
    worker = SimpleNamespace(
        reports=reports("teacher", gpu), submit_build=lambda target, arguments, environment: built.extend(arguments)
    )
    leaders = Played("teacher", (None,) * 4, tuple(reports("teacher", *(f"GPU-{i}" for i in range(4)))))
    engines: Any = SimpleNamespace(leaders=leaders, start_again=lambda _, engine: worker, nnodes=1)
    placement: Any = SimpleNamespace(session=SimpleNamespace(threads=[]))
    policies: dict[str, RestartPolicy] = {}
    monkeypatch.setattr(gkd.driver.groups.scorers, "ScorerReplicas", lambda *its: policies.update({its[0]: its[-1]}))
    monkeypatch.setattr(gkd.driver.groups.scorers, "gather", lambda *_: None)
    scorers = Scorers(config, find_inputs(config, print), Key.generate(), {"teacher": engines})
    addresses = ["tcp://127.0.0.1:5001", "tcp://127.0.0.1:5002"]
    scorers.watch(placement, {f"teacher:{name}": {"addresses": addresses} for name in ("code", "math")})
    policies["teacher:math"].start(1)
    ((settings, spec),) = built
    assert (spec.name, spec.port, spec.cache_bytes) == ("teacher:math", 5002, size)
    assert _engine_spec(settings, spec, None).cache_bytes == size


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_scorers_on_the_actors_gpu_take_turns(method: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins when the one before is done; those that have their own GPU do not sleep at all."""
    turns: list[str] = []

    class Played(Group):
        def submit_control(self, method: str, *_: Any, **__: Any) -> Any:
            turns.append(f"{self.name} begins {method}")
            return self.name

    def gather(calls: list[Any], *_: Any, **__: Any) -> list[list[None]]:
        turns.extend(f"{call} is done" for call in calls)
        return [[None]] * len(calls)

    for module in (gkd.driver.groups.scorers, gkd.cluster.workers.group):
        monkeypatch.setattr(module, "gather", gather)
    monkeypatch.setattr(Config, "groups_on_actor_gpus", lambda _: ["rollout", "teacher", "reference"])
    offload = config.cluster.model_copy(update={"offload": True})
    inputs: Any = None
    engines: Any = {
        name: SimpleNamespace(leaders=Played(name, (None,), tuple(reports(name, "GPU-0"))))
        for name in ("teacher", "reference", "reward_model")
    }
    scorers = Scorers(config.model_copy(update={"cluster": offload}), inputs, Key.generate(), engines)
    getattr(scorers, method)()
    assert turns == [
        f"teacher begins server.{method}", "teacher is done", f"reference begins server.{method}", "reference is done",
    ]  # fmt: skip
