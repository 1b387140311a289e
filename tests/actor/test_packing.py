"""Packing: nothing lost, nothing above the budget, and exactly the gradient of one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.actor import attention
from gkd.actor.balance import pack, share
from gkd.actor.model import Student, load
from gkd.actor.packing import collate
from gkd.algorithms.on_policy_distill import objective
from gkd.config import Loss
from tests.actor import models

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths, st.integers(1, 400))
def test_pack_keeps_every_sequence_within_the_budget(found: list[int], budget: int) -> None:
    bins = pack(found, budget)
    assert sorted(i for part in bins for i in part) == list(range(len(found)))
    assert all(sum(found[i] for i in part) <= budget or len(part) == 1 for part in bins)


@given(lengths, st.integers(1, 9))
def test_share_is_complete_and_as_even_as_the_longest_sequence_allows(found: list[int], ranks: int) -> None:
    shares = share(found, ranks)
    assert len(shares) == ranks
    assert sorted(i for part in shares for i in part) == list(range(len(found)))
    loads = [sum(found[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(found, default=0)


def test_collate_has_a_row_for_every_response_token_and_none_after_the_end() -> None:
    samples = models.scored(5)
    micro = collate(samples, models.VOCAB)
    response = torch.cat([torch.from_numpy(s.sample.response_ids) for s in samples])
    assert len(micro.rows) == len(response)
    assert torch.equal(micro.token_ids[micro.rows + 1], response.long())  # each row predicts its response token
    last = micro.cu_seqlens[1:].long() - 1
    assert not torch.isin(micro.rows, last).any()  # what follows the last token of a sequence is never predicted


def gradients(
    model: Student, batches: list[list], loss: Loss, chunk: int = 1024
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        value, _ = model(
            collate(batch, models.VOCAB), objective(collate(batch, models.VOCAB), loss, chunk, on_policy=True)
        )
        value.backward()
        total += value.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("name", ["reverse_kl", "sampled_reverse_kl"])
def test_packed_gradient_is_that_of_single_sequences(family: str, name: str, tmp_path) -> None:
    models.make(family).save_pretrained(tmp_path)
    student = load(tmp_path)
    assert student.packed == (family != "gemma2")
    samples = models.scored(7)
    loss = Loss(name=name)
    # The reference: Hugging Face's own forward, one sequence at a time, no packing and no attention of ours.
    plain = models.make(family).train()
    expected, reference = 0.0, {}
    for s in samples:
        micro = collate([s], models.VOCAB)
        logits = plain(micro.token_ids[None], use_cache=False).logits[0][micro.rows]
        value, _ = objective(micro, loss, 1024, on_policy=True)(logits, lambda x: x)
        value.backward()
        expected += value.item()
    reference = {f"lm.{n}": p.grad for n, p in plain.named_parameters()}
    parts = pack([len(s.sample.response_ids) + len(s.sample.request.prompt.token_ids) for s in samples], 40)
    assert 1 < len(parts) < len(samples)
    total, found = gradients(student, [[samples[i] for i in part] for part in parts], loss, chunk=5)
    assert total == pytest.approx(expected, rel=1e-5)
    assert found.keys() == reference.keys()
    for key, value in reference.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=key)


def test_gradient_checkpointing_changes_nothing(tmp_path) -> None:
    models.make("llama").save_pretrained(tmp_path)
    samples = models.scored(4)
    total, expected = gradients(load(tmp_path), [samples], Loss())
    again, found = gradients(load(tmp_path, gradient_checkpointing=True), [samples], Loss())
    assert again == pytest.approx(total, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_head_never_sees_more_than_a_chunk_of_positions(tmp_path) -> None:
    models.make("llama").save_pretrained(tmp_path)
    student = load(tmp_path)
    seen: list[int] = []
    student.lm.get_output_embeddings().register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    gradients(student, [models.scored(9)], Loss(), chunk=6)
    assert max(seen) == 6


def test_packed_attention_refuses_what_it_does_not_compute() -> None:
    x = torch.zeros(1, 2, 3, 4)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="softcap"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None, cu_seq_lens_q=bounds, max_length_q=3, softcap=30.0)
    with pytest.raises(ValueError, match="bounds"):
        attention.packed_attention(torch.nn.Module(), x, x, x, None)
