"""Decoding without transformers' ``generate``: the same tokens and numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from gkd.inference.decoding import decode, is_decoded_plainly
from gkd.inference.hf import _Draw
from gkd.types import Sampling
from tests.actor.models import make
from tests.families import make as family

LENGTHS, END, LIMIT = (3, 7, 5, 7, 1), 2, 9


def prompts() -> tuple[Tensor, Tensor]:
    """Padded on the left."""
    longest = max(LENGTHS)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in LENGTHS])
    return torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(1)) * mask, mask


def stops(ids: Tensor, scores: object, **_: object) -> Tensor:
    """A text that ends with token 5 or 6."""
    return (ids[:, -1] == 5) | (ids[:, -1] == 6)


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "mistral sliding window"])
@pytest.mark.parametrize("stopping", [None, stops])
@pytest.mark.parametrize("sampling", [Sampling(LIMIT), Sampling(LIMIT, 0.0), Sampling(LIMIT, presence_penalty=0.5)])
def test_tokens_and_logprobs_are_those_of_generate(name: str, stopping: object, sampling: Sampling) -> None:
    model = make(name).eval()
    model.generation_config = GenerationConfig()
    assert is_decoded_plainly(model)
    ids, mask = prompts()
    with torch.no_grad():
        own, theirs = (_Draw(sampling, range(len(ids)), 0, ids.shape[1]) for _ in range(2))
        made = decode(model, ids, mask, LIMIT, own.choose, [END, 4], stopping)
        expected = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=LIMIT,
            do_sample=False,
            logits_processor=LogitsProcessorList([theirs]),
            stopping_criteria=StoppingCriteriaList([stopping] if stopping else []),
            eos_token_id=[END, 4],
            pad_token_id=END,
        )[:, ids.shape[1] :]
    assert torch.equal(made, expected)
    assert torch.equal(torch.stack(own.logprobs), torch.stack(theirs.logprobs))


def test_a_model_that_keeps_other_states_is_left_to_generate() -> None:
    assert not is_decoded_plainly(family("mamba", 0))
