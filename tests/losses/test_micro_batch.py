"""Packing: nothing lost, nothing above the budget, and exactly the gradient of one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.actor import batches
from gkd.actor.batches import (
    SampleLength,
    balance_over_ranks,
    count_tokens,
    fits_in_pack,
    measure_lengths,
    pack,
)
from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.algorithms.aggregation import token_weights
from gkd.config import Algorithm, Loss, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.losses.targets import check_targets
from gkd.modeling import attention
from gkd.modeling.rows import Bounds, current_bounds
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, TrainingSample, VersionSpan
from tests.actor import models

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths, st.integers(1, 400), st.booleans())
def test_pack_keeps_every_sequence_within_the_budget(sizes: list[int], budget: int, padded: bool) -> None:
    """Padding counts where the model is given rows: one long sequence makes many short ones as long."""
    n_each = 1 + budget % 5  # samples of a prompt, which come together whatever their lengths
    bins = pack(
        [SampleLength(size, i // n_each, size // 2 if padded else 0) for i, size in enumerate(sizes)], budget, padded
    )
    assert sorted(i for part in bins for i in part) == list(range(len(sizes)))
    for part in bins:
        own = [sizes[i] for i in part]
        assert (len(own) * max(own) if padded else sum(own)) <= budget or len(part) == 1


@pytest.mark.parametrize(("n_prompt", "responses", "together"), [(500, (100, 300), True), (20, (50, 2000), False)])
def test_samples_of_a_prompt_are_padded_together_where_that_saves_more(
    n_prompt: int, responses: tuple[int, int], together: bool
) -> None:
    rng = np.random.default_rng(0)
    lengths = [SampleLength(n_prompt + int(rng.integers(*responses)), i // 8, n_prompt) for i in range(128)]
    parts = pack(lengths, 8192, padded=True)
    shared = sum(count_tokens(part, lengths) for part in parts)
    padding = sum(count_tokens(part, lengths, padded=True) for part in parts)
    real = sum(its.n_tokens for its in lengths)
    assert (shared < 0.6 * real) == together and (padding < 1.06 * real) == (not together)


def test_a_sample_longer_than_those_before_it_is_no_more_than_all_of_them_have_room_for() -> None:
    """Samples of a prompt come after shorter ones of another: 60 tokens beside 55 would be twice 60."""
    lengths = [SampleLength(60, 0, 30), SampleLength(35, 0, 30), SampleLength(55, 1, 50), SampleLength(65, 1, 50)]
    parts = pack(lengths, 112, padded=True)
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3]
    assert max(count_tokens(part, lengths, padded=True) for part in parts) <= 112


@given(lengths, st.integers(1, 9))
def test_share_is_complete_and_as_even_as_the_longest_sequence_allows(sizes: list[int], ranks: int) -> None:
    shares = balance_over_ranks([SampleLength(size) for size in sizes], ranks)
    assert len(shares) == ranks
    assert sorted(i for part in shares for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


prompts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40)  # number, and tokens of a response


def of_prompts(samples: list[tuple[int, int]]) -> list[SampleLength]:
    """Samples whose prompts have tokens in common, 30 more with each number; the first has none."""
    return [SampleLength(30 * prompt + response, prompt, 30 * prompt) for prompt, response in samples]


@given(prompts, st.integers(1, 400))
def test_packs_of_samples_with_common_prompts_stay_within_the_budget(
    samples: list[tuple[int, int]], budget: int
) -> None:
    lengths = of_prompts(samples)
    bins = pack(lengths, budget)
    assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
    for part in bins:
        n_tokens = sum(lengths[i].n_tokens - lengths[i].n_prompt for i in part)
        n_tokens += sum({lengths[i].prompt_id: lengths[i].n_prompt for i in part}.values())
        assert count_tokens(part, lengths) == n_tokens
        assert n_tokens <= budget or len(part) == 1
        assert sum(lengths[i].n_tokens for i in part) <= 2 * budget or len(part) == 1


@given(prompts, st.integers(1, 400))
def test_what_fits_in_a_pack_is_packed_into_one(samples: list[tuple[int, int]], budget: int) -> None:
    lengths = of_prompts(samples)
    assert fits_in_pack(range(len(lengths)), lengths, budget) == (len(pack(lengths, budget)) <= 1)


def trajectory(prompt: int, sampled: list[bool]) -> ScoredSample:
    """A sample of which the ``sampled`` tokens are, which has a prompt of that number as long as none is."""
    places = np.flatnonzero(sampled).tolist() or [len(sampled)]
    n = places[0]
    ids = np.concatenate([np.full(n, prompt), np.arange(10, 10 + len(sampled) - n)]).astype(np.int32)
    spans = tuple(VersionSpan(at, min(at + 1, len(ids)), 0) for at in places)
    request = SampleRequest(Prompt(10 * prompt + n, ids[:n], ""), 0, 0, Sampling(9))
    return ScoredSample(Sample(request, ids, np.array(sampled), np.zeros(len(ids), np.float32), spans, "stop"))


which = st.lists(st.booleans(), max_size=6).map(lambda its: [False, *its])


@given(st.lists(st.builds(trajectory, st.integers(1, 2), which), min_size=1, max_size=8), st.booleans())
def test_tokens_of_a_micro_batch_are_counted_as_they_are_laid_out(scored: list[ScoredSample], shared: bool) -> None:
    """Also of several turns, and of samples without a sampled token."""
    samples = [TrainingSample.from_sample(its.sample, 0, 0.0) for its in scored]
    nothing = [0.0] * len(scored)
    micro = collate(scored, None, nothing, nothing, shared=shared)
    assert count_tokens(range(len(scored)), measure_lengths(samples, shared)) == len(micro.sequences)
    before = [its.sample.token_ids[np.flatnonzero(its.sample.sampled) - 1] for its in scored]
    assert micro.sequences.token_ids[micro.rows].tolist() == np.concatenate(before).tolist()


def test_samples_of_a_prompt_share_a_micro_batch() -> None:
    """Also where prompts come one after the other, as groups do, and where one is more than a micro-batch holds."""
    lengths = [SampleLength(130, prompt, 100) for _ in range(8) for prompt in range(3)]
    bins = pack(lengths, 700)
    assert [{lengths[i].prompt_id for i in part} for part in bins] == [{0, 1}, {1, 2}, {2}]
    assert sum(count_tokens(part, lengths) for part in bins) == 24 * 30 + 5 * 100
    assert len(pack([SampleLength(130) for _ in lengths], 700)) == 5


def test_a_sample_goes_where_the_samples_of_its_prompt_before_it_went() -> None:
    """Not to the first micro-batch with room, which would have the prompt once more."""
    others = [SampleLength(450, 0, 100), SampleLength(440, 1, 100)]
    lengths = [*others, *(SampleLength(n_tokens, 2, 100) for n_tokens in (260, 255, 110))]
    assert pack(lengths, 700) == [[0], [1, 2], [3, 4]]


@given(prompts, st.integers(1, 5))
def test_common_prompts_leave_no_rank_more_than_it_would_have_without(
    samples: list[tuple[int, int]], ranks: int
) -> None:
    lengths = of_prompts(samples)
    shares = balance_over_ranks(lengths, ranks)
    assert sorted(i for part in shares for i in part) == list(range(len(lengths)))
    apart = balance_over_ranks([SampleLength(length.n_tokens) for length in lengths], ranks)
    assert max(count_tokens(part, lengths) for part in shares) <= max(count_tokens(part, lengths) for part in apart)


@given(prompts, st.integers(1, 5), st.integers(1, 8))
def test_tokens_of_the_busiest_rank_are_counted_as_samples_are_assigned(
    samples: list[tuple[int, int]], ranks: int, most: int
) -> None:
    lengths = of_prompts(samples)
    groups = [[i for i, (prompt, _) in enumerate(samples) if prompt == number and prompt] for number in range(6)]
    groups += [[i] for i, (prompt, _) in enumerate(samples) if not prompt]  # which have none
    busiest, shares = batches._assign(lengths, [group for group in groups if group], most, ranks)
    assert busiest == max(count_tokens(share, lengths) for share in shares)


@pytest.mark.parametrize(("n_prompts", "n", "ranks", "busiest"), [(8, 8, 4, 680), (1, 8, 4, 160), (3, 8, 4, 340)])
def test_a_prompt_goes_to_one_rank_unless_others_would_be_idle(
    n_prompts: int, n: int, ranks: int, busiest: int
) -> None:
    """Prompts of 100 tokens, responses of 30: two prompts a rank; two samples a rank; one prompt, or half of one."""
    lengths = [SampleLength(130, prompt, 100) for prompt in range(n_prompts) for _ in range(n)]
    shares = balance_over_ranks(lengths, ranks)
    assert max(count_tokens(part, lengths) for part in shares) == busiest


def test_collate_has_a_row_for_every_response_token_and_none_after_the_end() -> None:
    samples = models.scored(5)
    micro = micro_batch(samples)
    response = torch.cat([torch.from_numpy(s.sample.sampled_ids) for s in samples])
    assert len(micro.rows) == len(response)
    token_ids = micro.sequences.token_ids
    assert torch.equal(token_ids[micro.rows + 1], response.long())  # each row predicts its response token
    last = micro.sequences.cu_seqlens[1:].long() - 1
    assert not torch.isin(micro.rows, last).any()  # what follows the last token of a sequence is never predicted


def test_rows_of_the_student_that_a_whole_teacher_lacks_are_next_to_impossible() -> None:
    """A teacher that gave every token it has sends no tail."""
    targets = micro_batch(models.scored(3)).targets
    assert targets is not None and targets.tail_logprobs is not None
    assert float(targets.tail_logprobs.exp().max()) < 1e-6
    check_targets(models.VOCAB + 64, targets)


def micro_batch(
    samples: list[ScoredSample],
    weights: Sequence[float] | None = None,
    advantage: float = 1.0,
    shared: bool = False,
) -> MicroBatch:
    """One micro-batch, its tokens weighted 1 unless told otherwise, with advantages of either sign."""
    advantages = [advantage * (-1.0) ** s.sample.request.prompt.id for s in samples]
    return collate(samples, models.VOCAB, weights or [1.0] * len(samples), advantages, shared=shared)


def gradients(
    model: Student, batches: list[MicroBatch], algorithm: Algorithm, chunk: int = 1024
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for micro in batches:
        value, _ = model(micro, objective(micro, algorithm, Rollout(n=2), chunk))
        value.backward()
        total += value.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
OBJECTIVES = {
    "reverse_kl": Algorithm(),
    "sampled_reverse_kl": Algorithm(loss=Loss(name="sampled_reverse_kl")),
    "grpo": Algorithm(name="grpo"),
    "gspo": Algorithm(name="gspo"),
    "mixed": Algorithm(reward_weight=0.5),
}


@pytest.mark.parametrize(
    ("family", "name", "aggregation"),
    [
        *((family, "reverse_kl", weighing) for family, weighing in zip(models.FAMILIES, cycle(AGGREGATIONS))),
        *(("qwen2 tied", name, weighing) for name, weighing in zip(OBJECTIVES, cycle(AGGREGATIONS))),
    ],
)
def test_packed_gradient_is_that_of_single_sequences(family: str, name: str, aggregation: str, tmp_path) -> None:
    """Packing and accumulation change nothing, whatever the lengths and however tokens are weighed."""
    models.make(family).save_pretrained(tmp_path)
    student = load(tmp_path)
    assert student.is_packed and student.takes_rows == (family in models.IN_ROWS)
    samples, algorithm = models.scored(7), OBJECTIVES[name]
    lengths = [len(s.sample.sampled_ids) for s in samples]
    weights = token_weights(lengths, [True] * 7, aggregation, 12)
    # The reference: Hugging Face's own forward, one sequence at a time, no packing and no attention of ours.
    plain = models.make(family).train()
    expected = 0.0
    for s, weight in zip(samples, weights, strict=True):
        micro = micro_batch([s], [weight])
        logits = plain(micro.sequences.token_ids[None], use_cache=False).logits[0][micro.rows]
        value, _ = objective(micro, algorithm, Rollout(n=2), 1024)(logits, lambda x: x)
        value.backward()
        expected += value.item()
    reference = {f"lm.{n}": p.grad for n, p in plain.named_parameters()}
    parts = pack([SampleLength(len(s.sample.token_ids)) for s in samples], 40)
    assert 1 < len(parts) < len(samples)
    batches = [micro_batch([samples[i] for i in part], [weights[i] for i in part]) for part in parts]
    total, grads = gradients(student, batches, algorithm, chunk=5)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert grads.keys() == reference.keys()
    for key, value in reference.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "reverse_kl") for family in models.FAMILIES),
        ("llama", "grpo"),
        ("gpt2", "gspo"),
    ],
)
def test_gradient_of_a_group_is_the_same_with_its_prompt_once(family: str, name: str, tmp_path) -> None:
    """Prompts are computed once each, in whatever order their samples come, and the gradient is that of each alone."""
    models.make(family).save_pretrained(tmp_path)
    student, algorithm = load(tmp_path), OBJECTIVES[name]
    samples = [*models.group(3, n_prompt=6), *models.scored(2), *models.group(2, n_prompt=9, seed=1)]
    samples = [samples[i] for i in (0, 5, 3, 1, 6, 2, 4)]
    weights = token_weights([len(s.sample.sampled_ids) for s in samples], [True] * 7, "token_mean", 12)
    shared = micro_batch(samples, weights, shared=True)
    n_tokens = sum(len(s.sample.token_ids) for s in samples)
    assert len(shared.sequences) == n_tokens - 2 * 6 - 9
    apart = [micro_batch([sample], [weight]) for sample, weight in zip(samples, weights, strict=True)]
    total, expected = gradients(student, apart, algorithm)
    again, grads = gradients(student, [shared], algorithm, chunk=5)
    assert again == pytest.approx(total, rel=1e-5, abs=1e-7)
    for key, value in expected.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [*zip(OBJECTIVES, cycle(AGGREGATIONS)), *(("grpo", weighing) for weighing in AGGREGATIONS[:2])],
)
def test_two_times_two_is_four(name: str, aggregation: str, tmp_path) -> None:
    """Accumulating two micro-batches of two gives the gradient of one of four: most trainers' token mean does not."""
    models.make("llama").save_pretrained(tmp_path)
    student, samples = load(tmp_path), models.scored(4, seed=2)
    lengths = [len(s.sample.sampled_ids) for s in samples]
    assert sum(lengths[:2]) != sum(lengths[2:])
    weights = token_weights(lengths, [True] * 4, aggregation, 12)
    halves = [micro_batch(samples[i : i + 2], weights[i : i + 2]) for i in (0, 2)]
    total, expected = gradients(student, [micro_batch(samples, weights)], OBJECTIVES[name])
    again, grads = gradients(student, halves, OBJECTIVES[name])
    assert again == pytest.approx(total, rel=1e-5, abs=1e-7)
    for key, value in expected.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-6 * float(value.abs().max()), msg=key)


def test_gradient_checkpointing_changes_nothing(tmp_path) -> None:
    models.make("llama").save_pretrained(tmp_path)
    batch = [micro_batch(models.scored(4))]
    total, expected = gradients(load(tmp_path), batch, Algorithm())
    again, grads = gradients(load(tmp_path, gradient_checkpointing=True), batch, Algorithm())
    assert again == pytest.approx(total, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(grads[name], value, rtol=1e-5, atol=1e-6)


def test_dropout_is_off_in_training(tmp_path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": models.VOCAB, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)).save_pretrained(tmp_path)
    student, micro = load(tmp_path), micro_batch(models.scored(3))
    assert student.training
    assert torch.equal(student.compute_hidden(micro), student.compute_hidden(micro))


def test_head_never_sees_more_than_a_chunk_of_positions(tmp_path) -> None:
    models.make("llama").save_pretrained(tmp_path)
    student = load(tmp_path)
    seen: list[int] = []
    student.lm.get_output_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].shape[-2]))
    gradients(student, [micro_batch(models.scored(9))], Algorithm(), chunk=6)
    assert max(seen) == 6


def test_packed_attention_refuses_what_it_does_not_compute() -> None:
    x = torch.zeros(1, 2, 3, 4)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    with current_bounds.use(Bounds(starts, starts, 3), 3):
        with pytest.raises(ValueError, match="softcap"):
            attention.packed_attention(torch.nn.Module(), x, x, x, None, softcap=30.0)
        with pytest.raises(ValueError, match="attention_mask"):  # of the model's own, which packing would leave out
            attention.packed_attention(torch.nn.Module(), x, x, x, torch.zeros(3, 3))
        with pytest.raises(ValueError, match="bounds"):
            attention.packed_attention(torch.nn.Module(), *(torch.zeros(1, 2, 4, 4),) * 3, None)
