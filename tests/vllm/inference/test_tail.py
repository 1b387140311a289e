"""Scores in vLLM's model runner for GPUs: its own part for prompts and the one in its place, on a CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gkd.inference import vllm_spans
from gkd.inference.tail import tail_logprobs, tails_instead_of_ranks, tails_of
from gkd.inference.vllm_spans import SpanLogprobs, find_span_rows, spans_argument

D, V = 6, 300


def batch_of(scheduled: list[tuple[str, int, int, int, int]]) -> Any:
    """A step of requests: name, slot, first token, tokens, and how many of its tokens are prefilled."""
    names, slots, firsts, counts, prefills = map(list, zip(*scheduled, strict=True))
    return SimpleNamespace(
        req_ids=names, idx_mapping_np=np.array(slots), num_computed_prefill_tokens_np=np.array(firsts, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32), prefill_len_np=np.array(prefills, np.int32),
        query_start_loc_np=np.cumsum([0, *counts]).astype(np.int32), num_tokens=sum(counts), query_start_loc=None,
        idx_mapping=torch.tensor(slots),
    )  # fmt: skip


class Model:
    """Hidden states that depend on the token and its place alone, and a head."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(8, 64, D, generator=generator)
        self.head = torch.randn(D, V, generator=generator)
        self.tokens = torch.randint(V, (8, 64), generator=generator, dtype=torch.int32)
        self.head_rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(hidden))
        return hidden @ self.head

    def step(self, worker: Any, batch: Any, lengths: Any) -> dict[str, Any]:
        hidden = torch.cat(
            [
                self.hidden[slot, first : first + n]
                for slot, first, n in zip(
                    batch.idx_mapping_np, batch.num_computed_prefill_tokens_np, batch.num_scheduled_tokens, strict=True
                )
            ]
        )
        result: dict[str, Any] = worker.compute_prompt_logprobs(self.logits, hidden, batch, self.tokens, None, lengths)
        return result


def vllms_own(monkeypatch: pytest.MonkeyPatch, model: Model) -> Any:
    """Its class, with torch in place of its two Triton kernels."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import prompt_logprob

    def take_apart(logits: torch.Tensor, k: int, token_ids: torch.Tensor, logits_mode: bool) -> Any:
        ids = torch.cat([token_ids[:, None], logits.topk(k).indices], 1)
        logprobs = torch.log_softmax(logits, -1)
        return LogprobsTensors(ids, logprobs.gather(1, ids), torch.zeros(len(ids), dtype=torch.int32))

    def next_tokens(n: int, _: Any, slots: Any, __: Any, all_token_ids: torch.Tensor) -> torch.Tensor:
        batch = model.batch
        rows = zip(slots, batch.num_computed_prefill_tokens_np, batch.num_scheduled_tokens, strict=True)
        padded = torch.cat([all_token_ids, torch.zeros(len(all_token_ids), 64, dtype=torch.int32)], 1)
        return torch.cat([padded[slot, first + 1 : first + 1 + count] for slot, first, count in rows]).long()

    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", take_apart)
    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", next_tokens)
    return prompt_logprob.PromptLogprobsWorker(8, torch.device("cpu"))


@pytest.mark.parametrize(("k", "at_once"), [(0, 5), (5, 5), (V, 1000)])
def test_the_wanted_rows_are_those_that_vllm_itself_has(k: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks of any size, one begun in the cache, one preempted, others that want nothing beside them."""
    monkeypatch.setattr(vllm_spans, "AT_ONCE_BYTES", at_once * 4 * V)
    monkeypatch.setattr(vllm_spans, "HEAD_ROWS", 7)
    model: Any = Model()
    theirs, ours = vllms_own(monkeypatch, model), SpanLogprobs()
    lengths = np.array([30, 12, 25, 9, 0, 0, 0, 0], np.int32)
    spans = {"a": [(20, 30)], "b": [(3, 5), (7, 12)], "c": [(10, 25)]}
    for slot, name in enumerate("abcd"):
        own = None if name == "d" else spans_argument(spans[name])
        params = SimpleNamespace(
            prompt_logprobs=None if name == "d" else k, prompt_logprob_token_ids=None, extra_args=own
        )
        for worker in (theirs, ours):
            worker.add_request(name, slot, params)
    steps = [
        [("a", 0, 0, 13, 30), ("b", 1, 0, 4, 12), ("d", 3, 0, 9, 9)],
        [("a", 0, 13, 8, 30), ("b", 1, 4, 8, 12), ("c", 2, 6, 10, 25), ("d", 3, 9, 1, 9)],  # c's first 6 are cached
        [("a", 0, 21, 9, 30), ("b", 1, 12, 1, 12), ("c", 2, 16, 9, 25)],
        [("a", 0, 30, 1, 31)],
    ]
    answers: dict[str, list[tuple[Any, Any]]] = {}
    for scheduled in steps:
        model.batch = batch_of(scheduled)
        whole, wanted = (model.step(worker, model.batch, lengths) for worker in (theirs, ours))
        assert wanted.keys() == whole.keys()
        for name in wanted:
            answers.setdefault(name, []).append((whole[name], wanted[name]))
    assert answers.keys() == spans.keys() and all(len(its) == 1 for its in answers.values())
    for name, ((whole, wanted),) in answers.items():
        n_tokens = int(lengths["abc".index(name)])
        n_rows = sum(stop - start for start, stop in spans[name])
        assert len(wanted.logprobs) == n_rows and wanted.logprob_token_ids.dtype == torch.int32
        assert find_span_rows(n_rows, spans[name], n_tokens) == [slice(0, n_rows)]
        places = find_span_rows(len(whole.logprobs), spans[name], n_tokens)
        for column in ("logprob_token_ids", "logprobs"):
            expected = torch.cat([getattr(whole, column)[place] for place in places])
            torch.testing.assert_close(getattr(wanted, column), expected.to(getattr(wanted, column).dtype))
        slot = "abc".index(name)
        rows = torch.cat([model.hidden[slot, start - 1 : stop - 1] for start, stop in spans[name]])
        logprobs = torch.log_softmax(rows @ model.head, -1)
        if 0 < k < V:
            torch.testing.assert_close(tails_of(wanted), tail_logprobs(logprobs, logprobs.topk(k).indices))
    assert not ours._prompts  # nothing grows over a run


def test_the_head_runs_on_wanted_rows_alone_and_a_preempted_prompt_begins_again() -> None:
    model, worker = Model(), SpanLogprobs()
    params = SimpleNamespace(prompt_logprobs=3, extra_args=spans_argument([(20, 30)]))
    lengths = np.array([30], np.int32)
    worker.add_request("a", 0, params)
    assert not model.step(worker, batch_of([("a", 0, 0, 25, 30)]), lengths) and sum(model.head_rows) == 6
    worker.remove_request("a")
    assert not model.step(worker, batch_of([("a", 0, 25, 5, 30)]), lengths) and sum(model.head_rows) == 6
    worker.add_request("a", 0, params)
    rows = model.step(worker, batch_of([("a", 0, 0, 30, 30)]), lengths)["a"]
    assert rows.logprob_token_ids[:, 0].tolist() == model.tokens[0, 20:30].tolist()
    assert sum(model.head_rows) == 16


def test_a_process_without_the_logits_has_no_rows() -> None:
    """With the logits of tensor parallelism gathered in one process."""
    worker = SpanLogprobs()
    worker.add_request("a", 0, SimpleNamespace(prompt_logprobs=3, extra_args=spans_argument([(2, 4)])))
    model = Model()
    assert not worker.compute_prompt_logprobs(
        lambda hidden: None, model.hidden[0, :4], batch_of([("a", 0, 0, 4, 4)]), model.tokens,
        torch.zeros(0), np.array([4]),
    )  # fmt: skip


def test_it_is_called_as_vllm_calls_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    def methods(of: type) -> dict[str, list[str]]:
        public = {name: method for name, method in vars(of).items() if not name.startswith("_") and callable(method)}
        return {name: list(inspect.signature(method).parameters) for name, method in public.items()}

    own, theirs = methods(SpanLogprobs), methods(PromptLogprobsWorker)
    assert own.keys() == theirs.keys()
    for name in ("add_request", "remove_request", "compute_prompt_logprobs"):
        assert own[name] == theirs[name]
    runner = SimpleNamespace(sampler=object(), prompt_logprobs_worker=object())
    tails_instead_of_ranks(SimpleNamespace(model_runner=runner))
    assert isinstance(runner.prompt_logprobs_worker, SpanLogprobs)
    runner.prompt_logprobs_worker = None  # where the model's first layers are
    tails_instead_of_ranks(SimpleNamespace(model_runner=runner))
    assert runner.prompt_logprobs_worker is None
