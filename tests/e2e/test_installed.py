"""The installed package with code of the user's own, each in one file, from a folder outside the project."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gkd.recipes.sort_digits.task import SortDigits, recipes
from tests.data.models import save_model, word_tokenizer
from tests.e2e.conftest import ROOT

OWN, RECIPE = ROOT / "tests" / "own", ROOT / "recipes" / "your_own"
FILES = [
    *(RECIPE / f"{name}.py" for name in ("divergence", "advantage")),
    *(OWN / f"{name}.py" for name in ("brevity", "random_tokens", "file_transfer", "csv_tracker")),
    *(OWN / f"{name}.py" for name in ("plain_scorer", "likelihood")),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy, so that nothing is left in the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "outputs")
    shutil.copytree(ROOT, directory / "project", ignore=ignored, symlinks=True)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", directory, directory / "project"]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=120)
    (file,) = directory.glob("gkd-*.whl")
    return file


@pytest.fixture
def variables(variables: dict[str, str], wheel: Path, tmp_path: Path) -> dict[str, str]:
    """Have programs import what is installed from the wheel, into a directory of its own."""
    target = ["--target", tmp_path / "site", wheel]
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", *target]
    subprocess.run(install, check=True, timeout=120)
    return variables | {"PYTHONPATH": str(tmp_path / "site")}


def test_the_wheel_has_configurations_the_task_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "gkd/py.typed" in names
    for top, inside in (("conf", "gkd/conf"), ("recipes/sort_digits", "gkd/recipes/sort_digits")):
        expected = [path for path in (ROOT / top).rglob("*") if path.suffix in (".py", ".yaml")]
        assert expected and {f"{inside}/{path.relative_to(ROOT / top)}" for path in expected} <= names


def test_eight_parts_of_ones_own_in_one_run(start: Any, variables: dict[str, str], tmp_path: Path, cache: Path) -> None:
    """Also where gradients are added up in chunks, of samples of the weights before."""
    where = [sys.executable, "-c", "import gkd; print(gkd.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path}/site/gkd/__init__.py\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "weights").mkdir()
    words = word_tokenizer(words=("<unk>", "<eos>", "=", *map(str, range(10))))  # numbered unlike the student's
    save_model(tmp_path / "rater", len(words), words)
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 40
        shutil.copy(file, tmp_path / "mine")
    run = start(
        "algorithm.loss.name=mine/divergence.py:SkewKL", "algorithm.loss.alpha=0.2",
        "algorithm.advantage.name=mine/advantage.py:FixedBaseline", "algorithm.advantage.baseline=0.25",
        "reward.functions=[accuracy,mine/brevity.py:Brevity,reward_model]", "reward.Brevity.bonus=2.0",
        "reward_model.engine=mine/likelihood.py:Likelihood", f"reward_model.model.path={tmp_path}/rater",
        "reward_model.colocate_with=teacher", "teacher.engine=mine/plain_scorer.py:PlainScorer",
        "rollout.engine=mine/random_tokens.py:RandomTokens", "rollout.n_tokens=8",
        "weights.transfer=mine/file_transfer.py:Files", f"weights.directory={tmp_path}/weights",
        "trainer.trackers=[mine/csv_tracker.py:Csv]", "trainer.Csv.file=own.csv",
        "trainer.total_steps=3", "trainer.val_every=3", "trainer.batch_size=8", "data.val_limit=8",
        "schedule.max_staleness=1", "actor.max_tokens_per_micro_batch=200",
        recipe="distill_and_reward",
    )  # fmt: skip
    assert run.end(240) == 0, run.text()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["staleness/max"] for row in rows[1:]] == [0, 1, 1]
    assert ["mismatch/kl" in row for row in rows[1:]] == [True, False, False]  # of fresh tokens
    for row in rows[1:]:
        assert 0 <= row["timing_s/overlap"] <= row["timing_s/update"]  # gradients were added up in several chunks
        assert row["timing_s/drain"] >= 0
        assert row["advantage/mean"] == pytest.approx(row["reward/mean"] - 0.25)  # of built-in ones it is 0
        # KL is convex: mixing a share of the teacher into the student takes at least that share off forward KL.
        assert 0 < row["distill/loss"] <= 0.8 * row["distill/forward_kl"]
        assert row["actor/grad_norm"] > 0
        assert row["reward/Brevity/failed"] == 0.0
    with (run.output / "own.csv").open(newline="") as file:
        tracked = {(int(step), name): float(value) for step, name, value in csv.reader(file)}
    assert tracked == {(row["step"], name): value for row in rows for name, value in row.items() if name != "step"}
    samples = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert [sample["logprob_mean"] for sample in samples] == pytest.approx([-math.log(8)] * len(samples))
    for sample in samples:
        right, brevity = (sample["rewards"][name] for name in ("accuracy", f"{tmp_path}/mine/brevity.py:Brevity"))
        assert brevity == (2.0 * (1 - sample["length"] / 100) if right else 0.0)
    config = yaml.safe_load((run.output / "config.yaml").read_text())
    teacher, _ = recipes(SortDigits.Config(**config["data"]["sort_digits"]), seed=0)
    require_scored_as_by_transformers(samples, teacher.directory(cache), tmp_path / "rater")
    assert config["reward"]["Brevity"] == {"bonus": 2.0, "limit": 100}  # complete, to be repeated from
    assert config["algorithm"]["loss"]["name"] == f"{tmp_path}/mine/divergence.py:SkewKL"
    written = {f"{version}-0.safetensors" for version in (1, 2, 3)}
    assert {file.name for file in (tmp_path / "weights").iterdir()} == written | {f"{name}.read" for name in written}
    before, after = (load_file(tmp_path / "weights" / f"{version}-0.safetensors") for version in (1, 3))
    model = load_file(run.output / "model" / "model.safetensors")
    assert after.keys() == model.keys() and all((after[name] == model[name]).all() for name in model)
    assert any((before[name] != after[name]).any() for name in after)  # something was learned in between


def require_scored_as_by_transformers(samples: list[dict[str, Any]], teacher: Path, rater: Path) -> None:
    """Assert the teacher's log-probabilities of the responses, and the rater's of whole texts."""
    own, other = (AutoTokenizer.from_pretrained(path) for path in (teacher, rater))
    score, rate = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (teacher, rater))
    assert len({sample["rewards"]["reward_model"] for sample in samples}) > 4
    for sample in samples:
        response = own.convert_tokens_to_ids(sample["tokens"]["text"])
        logprobs = logprobs_of(score, own(sample["prompt"])["input_ids"] + response)[-len(response) :]
        assert sample["tokens"]["teacher"] == pytest.approx(logprobs, abs=1e-3)
        logprobs = logprobs_of(rate, other(sample["prompt"] + sample["response"])["input_ids"])
        assert sample["rewards"]["reward_model"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-3)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """The log-probabilities of all tokens but the first."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
