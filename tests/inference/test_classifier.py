"""The reward model's engine against the model itself, one sequence at a time and without padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from gkd.config import RewardModel
from gkd.data.model_info import ModelInfo
from gkd.inference.classifier import Classifier
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import RateRequest, ScoreRequest, ScorerRejected
from gkd.rollout.pipeline import reward_model_ids
from gkd.types import Prompt
from tests.data.models import TEMPLATE, word_tokenizer
from tests.scoring.conftest import Connect, Serve

VOCABULARY = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("reward_model")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Classifier:
    return Classifier(
        EngineSpec("reward_model", str(path), ModelInfo.read(str(path), "model"), RewardModel(), "cpu", "float32")
    )


def expected(path: Path, ids: list[int]) -> float:
    """Of one sequence alone; without a padding id the last token is the last."""
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


SEQUENCES = [[3, 4, 5], [7, 0], [1, 2, 3, 4, 5, 6, 7, 0, 0], [9]]


def test_ratings_are_the_models_own(engine: Classifier, path: Path) -> None:
    """Also of sequences that end with the id the model calls padding."""
    ratings = engine.rate([np.array(ids, np.int32) for ids in SEQUENCES])
    assert ratings == pytest.approx([expected(path, ids) for ids in SEQUENCES], abs=1e-5)


def test_a_batch_in_which_every_id_occurs(engine: Classifier, path: Path) -> None:
    every = [list(range(VOCABULARY)), [2, 3]]
    ratings = engine.rate([np.array(ids, np.int32) for ids in every])
    assert ratings == pytest.approx([expected(path, ids) for ids in every], abs=1e-5)


def test_over_the_wire(engine: Classifier, path: Path, serve: Serve, connect: Connect) -> None:
    client = connect(serve(engine).server.address)
    futures = [client.submit(RateRequest(np.array(ids, np.int32))) for ids in SEQUENCES]
    assert [f.result(20) for f in futures] == pytest.approx([expected(path, ids) for ids in SEQUENCES], abs=1e-5)
    for request, reason in (
        (ScoreRequest(np.array([3, 4], np.int32), ((1, 2),), 0), "is a reward model"),
        (RateRequest(np.zeros(33, np.int32)), "33 tokens"),
        (RateRequest(np.array([99], np.int32)), "token 99"),
        (RateRequest(np.zeros(0, np.int32)), "nothing to rate"),
    ):
        with pytest.raises(ScorerRejected, match=reason):
            client.submit(request).result(20)


def test_what_is_put_before_it() -> None:
    prompt = Prompt(0, np.array([5, 6], np.int32), "a b")
    ids = np.array([7], np.int32)
    plain, chat = word_tokenizer(), word_tokenizer(template=TEMPLATE)
    assert reward_model_ids(prompt, ids, "c", plain, True).tolist() == [5, 6, 7]  # the very tokens
    assert reward_model_ids(prompt, ids, " c", plain, False).tolist() == plain("a b c")["input_ids"]
    assert reward_model_ids(prompt, ids, "c", chat, False).tolist() == plain("<user> a b <assistant> c")["input_ids"]
    chat_prompt = Prompt(0, ids, "", messages=({"role": "system", "content": "d"}, {"role": "user", "content": "a"}))
    chat_ids = plain("<system> d <user> a <assistant> c")["input_ids"]
    assert reward_model_ids(chat_prompt, ids, "c", chat, False).tolist() == chat_ids
    with_tools = word_tokenizer(template="{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + TEMPLATE)
    tools = ({"name": "b"}, {"name": "c"})
    for given, before in ((tools, "b c "), ((), "")):
        called = Prompt(0, ids, "", messages=chat_prompt.messages, tools=given)
        expected = plain(f"{before}<system> d <user> a <assistant> c")["input_ids"]
        assert reward_model_ids(called, ids, "c", with_tools, False).tolist() == expected
