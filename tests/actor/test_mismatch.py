"""Engine against trainer by the age of tokens, against means over hand-picked tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.actor import training
from gkd.actor.loading import load
from gkd.actor.mismatch import SHARE, compute_means, mark_stale_tokens, split_by_age
from gkd.actor.optimizer import adamw
from gkd.actor.staging import Staging
from gkd.actor.training import RankTrainer
from gkd.config.compose import compose
from gkd.losses.objective import GIVEN, SAMPLED
from gkd.types import TrainingSample, VersionSpan
from tests.actor import models
from tests.samples import training_sample


def across(*spans: tuple[int, int]) -> TrainingSample:
    """A response whose first tokens are of one version and whose further ones of another: (length, version) each."""
    start, versions = 4, []
    for length, version in spans:
        versions.append(VersionSpan(start, start + length, version))
        start += length
    return dataclasses.replace(training_sample(n=start - 4), versions=tuple(versions))


@pytest.mark.parametrize(
    ("samples", "stale"),
    [
        ([across((2, 3), (3, 4)), across((1, 4))], [True, True, False, False, False, False]),
        ([across((2, 4))], [False, False]),
        ([across((2, 1))], [True, True]),
    ],
)
def test_means_are_over_tokens_of_one_age(samples: list[TrainingSample], stale: list[bool]) -> None:
    mask = mark_stale_tokens(samples, version=4)
    assert mask.tolist() == stale
    ratio = torch.arange(1.0, len(stale) + 1)
    kl = ratio - 1 - ratio.log()
    sums, largest = split_by_age(
        {"mismatch/kl": kl, "mismatch/is_ratio_mean": ratio, "actor/entropy": ratio},
        {"mismatch/is_ratio_max": ratio.max()},
        mask,
    )
    row = compute_means(
        {**{k: float(v.sum()) / len(stale) for k, v in sums.items()}, **{k: float(v) for k, v in largest.items()}}
    )
    assert row["actor/entropy"] == pytest.approx(float(ratio.mean()))
    assert row[SHARE] == pytest.approx(sum(stale) / len(stale))
    for prefix, kept in (("", ~mask), ("stale_", mask)):
        names = [f"mismatch/{prefix}{name}" for name in ("kl", "is_ratio_mean", "is_ratio_max")]
        if not kept.any():
            assert not set(names) & set(row)
            continue
        expected = [kl[kept].mean(), ratio[kept].mean(), ratio[kept].max()]
        assert [row[name] for name in names] == pytest.approx([float(value) for value in expected])


@pytest.mark.parametrize(("version", "left_out"), [(3, "mismatch/"), (4, "mismatch/stale_")])
def test_what_no_token_is_of_is_left_out_of_several_micro_batches(version: int, left_out: str) -> None:
    """In float32 their shares, 1/12 + 10/12 + 1/12, are less than 1 together."""
    added, largest = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for n in (1, 10, 1):
        stale, ratio = mark_stale_tokens([across((n, version))], version=4), torch.full((n,), 1.5)
        sums, most = split_by_age({"mismatch/kl": ratio, "mismatch/is_ratio_mean": ratio}, {}, stale)
        added = {name: added.get(name, torch.zeros(())) + values.sum() / 12 for name, values in sums.items()}
        largest = {name: max(largest.get(name, value), value) for name, value in most.items()}
    row = compute_means({name: float(value) for name, value in (added | largest).items()})
    kept = {"mismatch/": "mismatch/stale_", "mismatch/stale_": "mismatch/"}[left_out]
    names = {f"{kept}{name}" for name in ("kl", "is_ratio_mean", "is_ratio_max")}
    assert row.keys() == {SHARE, *names}
    assert [row[name] for name in names] == pytest.approx([1.5] * 3)


def test_the_share_of_stale_tokens_is_of_those_that_were_sampled() -> None:
    """The data's own answers are of no age, whatever weights they count as sampled from."""
    stale, sampled = torch.tensor([True, True, False, False]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    ratio = torch.full((4,), 1.5)
    sums = {"mismatch/kl": ratio, "mismatch/is_ratio_mean": ratio, SAMPLED: sampled, GIVEN: 1 - sampled}
    split, largest = split_by_age(sums, {}, stale)
    row = {name: float(values.mean()) for name, values in split.items()} | {n: float(v) for n, v in largest.items()}
    assert compute_means(row)[SHARE] == pytest.approx(0.5)


def test_an_empty_micro_batch_has_no_tokens_of_any_age() -> None:
    none = torch.zeros(0)
    sums, largest = split_by_age(
        {"mismatch/kl": none, "mismatch/is_ratio_mean": none}, {}, mark_stale_tokens([], version=4)
    )
    assert all(len(values) == 0 for values in sums.values())
    assert all(float(value) == 0 for value in largest.values())


@pytest.mark.parametrize("recipe", ["on_policy_distill", "grpo"])
def test_only_weights_that_engines_have_are_compared_with_theirs(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step's later updates these are at hand where ratios take them, and are not computed for the metric alone."""
    models.make("llama").save_pretrained(tmp_path)
    config = compose([f"+recipe={recipe}", "actor.lr=0.1"])
    scored = models.scored(4, models.VOCAB)
    monkeypatch.setattr(training, "fetch_samples", lambda *_: scored)
    samples, cpu = [models.on_driver("ref", i, one) for i, one in enumerate(scored)], torch.device("cpu")
    student = load(tmp_path)
    trainer = RankTrainer(student, adamw(student, config.actor), Staging(cpu), config, 0, 1, cpu)
    if recipe == "grpo":
        trainer.compute_logprobs(samples, old=True, reference=False)
    weights, n = [1.0 / s.n_sampled for s in samples], sum(s.n_sampled for s in samples)
    first, second = (trainer.update(samples, weights, n, 1, final) for final in (False, True))
    assert "mismatch/kl" in first
    assert second.get("mismatch/kl") == (first["mismatch/kl"] if recipe == "grpo" else None)
    assert "mismatch/kl" in trainer.update(samples, weights, n, 2)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("kinds", ["sgsg", "gggg", "ssss"])
def test_metrics_of_sampled_and_of_given_tokens_are_means_over_these(
    kinds: str, max_staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the share of the data's own answers: the others are not thinned out by them."""
    models.make("llama").save_pretrained(tmp_path)
    settings = ["algorithm.on_policy_share=0.5", "algorithm.supervised_weight=0.3", "algorithm.kl.coef=0.1"]
    config = compose(["+recipe=on_policy_distill", *settings, "schedule.in_flight=true", "schedule.max_staleness=1"])
    config = config.with_settings({"schedule.max_staleness": max_staleness})
    scored = [
        dataclasses.replace(one, reference=one.sample.sampled_logprobs - 0.25) for one in models.scored(4, models.VOCAB)
    ]
    for one, kind in zip(scored, kinds, strict=True):
        if kind == "g":
            one.sample.logprobs[one.sample.sampled] = np.nan
    monkeypatch.setattr(training, "fetch_samples", lambda samples, _: [scored[sample.slot] for sample in samples])
    samples, cpu = [models.on_driver("ref", i, one) for i, one in enumerate(scored)], torch.device("cpu")

    def metrics_of(kind: str) -> dict[str, float]:
        student = load(tmp_path)
        trainer = RankTrainer(student, adamw(student, config.actor), Staging(cpu), config, 0, 1, cpu)
        chosen = [sample for sample, its in zip(samples, kinds, strict=True) if its in kind]
        n = sum(sample.n_sampled for sample in chosen)
        return trainer.update(chosen, [1.0 / n] * len(chosen), n, 1) if chosen else {}

    both, sampled, given = metrics_of("sg"), metrics_of("s"), metrics_of("g")
    of_sampled = {"mismatch/kl", "mismatch/is_ratio_mean", "mismatch/is_ratio_max"}
    of_sampled |= {"actor/kl_reference"} if config.algorithm.needs_reference else set()
    assert {name for name in both if name in of_sampled} == (of_sampled if "s" in kinds else set())
    assert ("actor/cross_entropy" in both) == ("g" in kinds)
    for name in of_sampled & both.keys():
        assert both[name] == pytest.approx(sampled[name], rel=1e-5)
    if "g" in kinds:
        assert both["actor/cross_entropy"] == pytest.approx(given["actor/cross_entropy"], rel=1e-5)
        assert given["actor/supervised_loss"] == pytest.approx(0.3 * given["actor/cross_entropy"], rel=1e-5)
    assert not {name for name in both if name.endswith("share") and not name.startswith("mismatch/")}
