"""A rollout worker on the thread of the test, with the engine that needs no vLLM."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import pytest

from gkd.config import load
from gkd.data.answers import with_turn_end
from gkd.data.model_info import ModelInfo
from gkd.data.tokenizer import load_tokenizer
from gkd.inference.engine import EngineSpec
from gkd.rollout.worker import RolloutWorker
from gkd.types import Prompt, SampleRequest, Sampling, ScoredSample
from tests.data.models import WORDS, save_model

A, B, TURN_END = (WORDS.index(word) for word in ("a", "b", "d"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> RolloutWorker:
    path = str(save_model(tmp_path_factory.mktemp("worker") / "model"))
    model = with_turn_end(ModelInfo.read(path, "model.path", load_tokenizer(path)), TURN_END)
    config = load({"rollout": {"engine": "hf"}})
    return RolloutWorker(config, EngineSpec.for_rollout(config, path, model, 64, 0, "cpu"))


def done(worker: RolloutWorker, requests: list[SampleRequest]) -> list[ScoredSample]:
    worker._add([replace(request, key=key) for key, request in enumerate(requests)])
    found: dict[int, ScoredSample] = {}
    while len(found) < len(requests):
        try:
            item = worker.pipeline.scored.get_nowait()
        except queue.Empty:
            worker._step()
            continue
        assert isinstance(item, tuple)
        found[item[0].key] = item[1]
        assert item[0].finish_reason == item[1].sample.finish_reason
    return [found[key] for key in sorted(found)]


def test_sampling_stops_where_the_chat_template_ends_a_turn(worker: RolloutWorker) -> None:
    prompt = Prompt(0, np.array([A, B], np.int32), "a b")
    sampled = [s.sample for s in done(worker, [SampleRequest(prompt, i, i, Sampling(32)) for i in range(16)])]
    assert TURN_END in {int(s.token_ids[-1]) for s in sampled if s.finish_reason == "stop"}
    assert all(TURN_END not in s.sampled_ids[:-1] for s in sampled)


def test_an_own_answer_without_its_end_was_cut(worker: RolloutWorker) -> None:
    prompt = Prompt(0, np.array([A], np.int32), "a")
    whole, cut = (replace(prompt, answer_ids=np.array(ids, np.int32)) for ids in ([B, TURN_END], [B, B]))
    requests = [SampleRequest(one, 0, 0, Sampling(2), own_answer=True) for one in (whole, cut)]
    assert [s.sample.finish_reason for s in done(worker, requests)] == ["stop", "length"]
