"""Packing: nothing lost, nothing above the budget, and exactly the gradient of one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.actor.batches import balance_over_ranks, pack
from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.algorithms.aggregation import token_weights
from gkd.config import Algorithm, Loss, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.losses.targets import check_targets
from gkd.modeling import attention
from gkd.types import ScoredSample
from tests.actor import models

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths, st.integers(1, 400), st.booleans())
def test_pack_keeps_every_sequence_within_the_budget(sizes: list[int], budget: int, padded: bool) -> None:
    """Padding counts where the model is given rows: one long sequence makes many short ones as long."""
    bins = pack(sizes, budget, padded)
    assert sorted(i for part in bins for i in part) == list(range(len(sizes)))
    for part in bins:
        own = [sizes[i] for i in part]
        assert (len(own) * max(own) if padded else sum(own)) <= budget or len(part) == 1


@given(lengths, st.integers(1, 9))
def test_share_is_complete_and_as_even_as_the_longest_sequence_allows(sizes: list[int], ranks: int) -> None:
    shares = balance_over_ranks(sizes, ranks)
    assert len(shares) == ranks
    assert sorted(i for part in shares for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_collate_has_a_row_for_every_response_token_and_none_after_the_end() -> None:
    samples = models.scored(5)
    micro = micro_batch(samples)
    response = torch.cat([torch.from_numpy(s.sample.sampled_ids) for s in samples])
    assert len(micro.rows) == len(response)
    assert torch.equal(micro.token_ids[micro.rows + 1], response.long())  # each row predicts its response token
    last = micro.cu_seqlens[1:].long() - 1
    assert not torch.isin(micro.rows, last).any()  # what follows the last token of a sequence is never predicted


def test_rows_of_the_student_that_a_whole_teacher_lacks_are_next_to_impossible() -> None:
    """A teacher that gave every token it has sends no tail."""
    targets = micro_batch(models.scored(3)).targets
    assert targets is not None and targets.tail_logprobs is not None
    assert float(targets.tail_logprobs.exp().max()) < 1e-6
    check_targets(models.VOCAB + 64, targets)


@given(st.integers(0, 60))
def test_padding_is_more_sequences_no_longer_than_the_others(n_more: int) -> None:
    micro = micro_batch(models.scored(5))
    n, n_sequences = len(micro.token_ids), len(micro.cu_seqlens)
    padded = micro.pad(n + n_more)
    assert torch.equal(padded.token_ids[:n], micro.token_ids) and len(padded.token_ids) == n + n_more
    assert torch.equal(padded.cu_seqlens[:n_sequences], micro.cu_seqlens) and padded.cu_seqlens[-1] == n + n_more
    own = padded.cu_seqlens[n_sequences - 1 :].diff().tolist()
    assert all(0 < length <= micro.max_seqlen for length in own)
    assert padded.position_ids[n:].tolist() == [i for length in own for i in range(length)]


def micro_batch(
    samples: list[ScoredSample], weights: Sequence[float] | None = None, advantage: float = 1.0
) -> MicroBatch:
    """One micro-batch, its tokens weighted 1 unless told otherwise, with advantages of either sign."""
    advantages = [advantage * (-1.0) ** s.sample.request.prompt.id for s in samples]
    return collate(samples, models.VOCAB, weights or [1.0] * len(samples), advantages)


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
    assert student.is_packed == (family != "gemma2")
    samples, algorithm = models.scored(7), OBJECTIVES[name]
    lengths = [len(s.sample.sampled_ids) for s in samples]
    weights = token_weights(lengths, [True] * 7, aggregation, 12)
    # The reference: Hugging Face's own forward, one sequence at a time, no packing and no attention of ours.
    plain = models.make(family).train()
    expected = 0.0
    for s, weight in zip(samples, weights, strict=True):
        micro = micro_batch([s], [weight])
        logits = plain(micro.token_ids[None], use_cache=False).logits[0][micro.rows]
        value, _ = objective(micro, algorithm, Rollout(n=2), 1024)(logits, lambda x: x)
        value.backward()
        expected += value.item()
    reference = {f"lm.{n}": p.grad for n, p in plain.named_parameters()}
    parts = pack([len(s.sample.token_ids) for s in samples], 40)
    assert 1 < len(parts) < len(samples)
    batches = [micro_batch([samples[i] for i in part], [weights[i] for i in part]) for part in parts]
    total, grads = gradients(student, batches, algorithm, chunk=5)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert grads.keys() == reference.keys()
    for key, value in reference.items():
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
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="softcap"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None, cu_seq_lens_q=bounds, max_length_q=3, softcap=30.0)
    with pytest.raises(ValueError, match="attention_mask"):  # of the model's own, which packing would leave out
        attention.packed_attention(torch.nn.Module(), x, x, x, torch.zeros(3, 3), cu_seq_lens_q=bounds, max_length_q=3)
    with pytest.raises(ValueError, match="bounds"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None)
