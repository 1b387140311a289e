"""What the driver has the actor's ranks do when memory runs out, in which order; the ranks are played."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch._inductor.config
from hypothesis import example, given
from hypothesis import strategies as st

import gkd.actor.group
from gkd.actor.batches import SampleLength, balance_over_ranks, measure_lengths, pack
from gkd.actor.group import ActorGroup
from gkd.actor.ranks import RELEASES_GIL
from gkd.config import load
from gkd.errors import OutOfMemory
from tests.samples import training_sample


class Ranks:
    """Ranks that do what is waited for; ``evaluate`` runs out of memory the first time."""

    def __init__(self, n: int = 2) -> None:
        self.did: list[str] = []
        self.n, self.n_submitted = n, 0

    def __len__(self) -> int:
        return self.n

    def submit_each(self, method: str, args: Sequence[Any], activity: str | None = None) -> Any:
        self.n_submitted += 1
        return SimpleNamespace(activity=method.rpartition(".")[2], refs=(), n=self.n_submitted)

    def call(self, method: str, budget: int, timeout_s: float) -> None:
        self.did.append(f"{method.rpartition('.')[2]} {budget}")

    def gather(self, calls: Sequence[Any], timeout_s: float) -> list[list[Any]]:
        for call in calls:
            self.did.append(call.activity)
            if call.activity == "evaluate" and self.did.count("evaluate") == 1:
                raise OutOfMemory("the actor ran out of memory", 30)
        return [[{"distill/reverse_kl": 0.5}] for _ in calls]


def test_chunks_are_accumulated_again_before_what_ran_out_of_memory_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind them, a rank whose memory ran out in one would keep the other waiting in the call."""
    ranks: Any = Ranks()
    actor = ActorGroup(ranks, load({"actor": {"max_tokens_per_micro_batch": 60}}), "", lambda: ranks)
    monkeypatch.setattr(gkd.actor.group, "gather_partners", ranks.gather)
    monkeypatch.setattr(gkd.actor.group, "read_outcome", lambda call: None)  # it shows when they are waited for
    monkeypatch.setattr(actor, "_start_again", lambda: ranks.did.append("start again"))
    for key in range(2):
        actor.accumulate([[training_sample(key)]])
    assert actor.evaluate([training_sample(2)]) == {"distill/reverse_kl": 0.5}
    first, again = ["accumulate_chunks", "accumulate_chunks"], "accumulate_chunks"  # all of them in one call
    assert ranks.did == [*first, "evaluate", "start again", "set_token_budget 30", again, "evaluate"]


def test_chunks_that_are_done_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have hundreds, and each look asks Ray about every rank."""
    ranks: Any = Ranks()
    actor = ActorGroup(ranks, load({"actor": {"max_tokens_per_micro_batch": 60}}), "", lambda: ranks)
    looked_at, done = list[int](), list[bool]()

    def read_outcome(call: Any) -> bool | None:
        looked_at.append(call.n)
        return done[call.n - 1] or None

    monkeypatch.setattr(gkd.actor.group, "read_outcome", read_outcome)
    monkeypatch.setattr(gkd.actor.group, "is_done", lambda call: done[call.n - 1])
    for key in range(4):
        actor.accumulate([[training_sample(key)]])
        done.append(key != 2)
    assert looked_at == [1, 2, 3]
    actor.recover_chunks()
    assert looked_at[3:] == [3, 4] and actor.accumulates
    done[2] = True
    actor.recover_chunks()
    actor.recover_chunks()
    assert looked_at[5:] == [3, 4] and not actor.accumulates


@pytest.mark.parametrize(
    ("algorithm", "computed"), [({"name": "on_policy_distill"}, 0), ({"loss": {"name": "sampled_reverse_kl"}}, 2)]
)
def test_log_probabilities_are_computed_beforehand_where_ratios_are_taken(
    algorithm: dict[str, Any], computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: Any = Ranks()
    config = load({"actor": {"mini_batch_size": 1}, "algorithm": algorithm})
    actor = ActorGroup(ranks, config, "", lambda: ranks)
    monkeypatch.setattr(gkd.actor.group, "gather_partners", ranks.gather)
    actor.update([training_sample(key) for key in range(2)], 1)
    assert ranks.did == ["compute_logprobs"] * computed + ["update"] * 2


def test_the_time_of_an_update_is_that_of_the_slowest_rank_with_the_references_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With LoRA the actor without its adapter is the reference."""
    results: dict[str, list[Any]] = {"compute_logprobs": [2.0, 3.0], "accumulate_chunks": [5.0, 1.0], "apply": [{}, {}]}
    ranks: Any = Ranks()
    ranks.submit = lambda method, *_, **__: ranks.submit_each(method, ())
    config = load(
        {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "actor": {"lora": {"r": 2}}, "rollout": {"n": 2}}
    )
    actor = ActorGroup(ranks, config, "", lambda: ranks)
    monkeypatch.setattr(gkd.actor.group, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(gkd.actor.group, "gather_partners", lambda calls, _: [results[call.activity] for call in calls])
    monkeypatch.setattr(gkd.actor.group, "read_outcome", lambda call: None)
    actor.accumulate([[training_sample(0)], [training_sample(1)]])
    assert actor.apply(1)["timing_s/update"] == 3.0 + 3.0 + 5.0  # for both chunks, then both chunks


@given(st.lists(st.integers(1, 80), min_size=1, max_size=12), st.integers(1, 4))
@example([31, 30, 30, 30], 2)  # within the bound of the mean and the longest, to the token
@example([61], 2)  # alone with its rank, whatever its length
def test_what_fits_is_what_every_rank_can_take_in_one_micro_batch(lengths: list[int], n_ranks: int) -> None:
    group: Any = range(n_ranks)
    actor = ActorGroup(group, load({"actor": {"max_tokens_per_micro_batch": 60}}), "", lambda: group)
    samples = [training_sample(prompt_id=i, n_prompt=0, n=length) for i, length in enumerate(lengths)]
    shares = balance_over_ranks([SampleLength(length) for length in lengths], n_ranks)
    assert actor.fits(samples) == all(sum(lengths[i] for i in part) <= 60 or len(part) == 1 for part in shares)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=16),
    st.integers(1, 3),
    st.booleans(),
)
def test_prompts_count_once_in_what_fits_where_they_are_computed_once(
    drawn: list[tuple[int, int]], n_ranks: int, shared: bool
) -> None:
    group: Any = range(n_ranks)
    settings = {"max_tokens_per_micro_batch": 60, "share_prompts": shared}
    actor = ActorGroup(group, load({"actor": settings}), "", lambda: group)
    samples = [training_sample(prompt_id=prompt, n_prompt=10 * prompt + 1, n=n) for prompt, n in drawn]
    lengths = measure_lengths(samples, shared)
    shares = balance_over_ranks(lengths, n_ranks)
    assert actor._shares(samples) == shares
    assert actor.fits(samples) == all(len(pack([lengths[i] for i in share], 60)) <= 1 for share in shares)


@pytest.mark.parametrize("answers", [[True, True], [False, False]])
def test_ranks_that_cannot_share_prompts_get_shares_without(answers: list[bool]) -> None:
    """As of a model whose sequences are padded: whole groups would leave one of them more work."""
    ranks: Any = Ranks(2)
    ranks.control = lambda method, **_: answers
    actor = ActorGroup(ranks, load({}), "", lambda: ranks)
    actor.read_sharing()
    samples = [training_sample(prompt_id=i // 2, n_prompt=90, n=10 + 40 * (i < 2)) for i in range(4)]
    assert sorted(map(sorted, actor._shares(samples))) == ([[0, 1], [2, 3]] if answers[0] else [[0, 2], [1, 3]])


@pytest.mark.parametrize("n", [1, 2])
def test_ranks_that_wait_for_each_other_launch_kernels_without_the_gil(n: int) -> None:
    """The thread that hands on what a rank has could not run while a launch waits for a rank without memory."""
    built: list[dict[str, str]] = []
    ranks: Any = Ranks(n)
    ranks.reports = [SimpleNamespace(device="cuda")]
    ranks.submit_build = lambda target, arguments, environment: built.append(environment)
    ActorGroup(ranks, load({}), "", lambda: ranks).submit_build()
    assert (RELEASES_GIL.items() <= built[0].items()) == (n > 1)
    assert all(name in inspect.getsource(torch._inductor.config) for name in RELEASES_GIL)
