"""The data's own answers in place of samples; Ray's object store is played by the objects themselves."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from gkd.errors import RunFailed
from gkd.observability.metrics import staleness_metrics
from gkd.rollout.dataset_answers import DatasetAnswers
from gkd.types import Prompt, SampleRequest, Sampling

END = 9


def requests(*answers: list[int] | None) -> list[SampleRequest]:
    tokens = [None if answer is None else np.array(answer, np.int32) for answer in answers]
    prompts = [Prompt(i, np.array([1, 2], np.int32), "", answer_ids=ids) for i, ids in enumerate(tokens)]
    return [SampleRequest(prompt, 0, 0, Sampling(4), from_dataset=True) for prompt in prompts]


def test_answers_count_as_sampled_from_the_weights_that_learn_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda samples: samples)
    answers = DatasetAnswers([END])
    submitted = {step: answers.submit(requests([5, END], [5, 6, 7]), step) for step in (1, 2)}
    for step in (2, 1):
        (batch,) = answers.collect_in_order(submitted[step], 0.0)
        assert [sample.key for sample in batch] == submitted[step]
        assert staleness_metrics(batch, step - 1) == {"staleness/mean": 0.0, "staleness/max": 0.0}
        assert [(sample.n_sampled, sample.finish_reason) for sample in batch] == [(2, "stop"), (3, "length")]
        stored = [sample.ref[sample.slot].sample for sample in batch]
        assert [own.sampled_ids.tolist() for own in stored] == [[5, END], [5, 6, 7]]
        assert all(np.isnan(own.logprobs).all() for own in stored)
    held_out = answers.make_samples([request.prompt for request in requests([5, END], None)])
    assert [(sample.prompt_id, sample.version) for sample in held_out] == [(0, 0)]
    with pytest.raises(RunFailed, match="prompt 1 has no"):
        answers.submit(requests([5], None), 1)
