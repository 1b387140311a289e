"""Scores of the positions that a request wants, in place of all of its prompt, in vLLM's model runner for GPUs.

vLLM's own :class:`PromptLogprobsWorker` puts the head on every token of a step, takes the top K of all these rows, and
counts ranks, which nobody here reads. :class:`SpanLogprobs` has its four methods and puts the head on the rows of the
wanted spans alone, once; their ids are 32 bits wide. The model runner for CPUs has no such part, and scores whole
prompts (:mod:`gkd.inference.tail`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

SPANS = "gkd_spans"
"""In ``SamplingParams.extra_args``: start and stop of each wanted span, one after the other."""
HEAD_ROWS = 1024  # of which vLLM takes the logits at a time, too
AT_ONCE_BYTES = 64 << 20  # of float32 scores; vLLM has measured what is free without these copies


def spans_argument(spans: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """Return the ``extra_args`` of a request for the scores of the tokens in ``spans``."""
    return {SPANS: [place for span in spans for place in span]}


@dataclass(slots=True)
class _ScoredPrompt:
    """A request under way: its K, its spans, and vLLM's LogprobsTensors of what was scored so far."""

    k: int
    spans: list[tuple[int, int]]
    scored: list[Any] = field(default_factory=list)


class _Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a step, those before the tokens from ``token`` on of request ``slot``."""

    req_id: str
    slot: int
    start: int
    stop: int
    token: int


class SpanLogprobs:
    """Stands in for vLLM's ``PromptLogprobsWorker``; its methods take what those of that class take."""

    def __init__(self) -> None:
        self._prompts: dict[str, _ScoredPrompt] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Take on a request, which may want no scores."""
        places = (sampling_params.extra_args or {}).get(SPANS)
        if sampling_params.prompt_logprobs is not None and places is not None:
            spans = list(zip(places[::2], places[1::2], strict=True))
            self._prompts[req_id] = _ScoredPrompt(sampling_params.prompt_logprobs, spans)

    def remove_request(self, req_id: str) -> None:
        """Forget a request that is over or will be computed from its beginning again."""
        self._prompts.pop(req_id, None)

    def compute_prompt_token_id_logprobs(self, *_: Any) -> dict[str, Tensor]:
        """Return nothing: no request here names ids of its own."""
        return {}

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[Tensor], Tensor | None],
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: NDArray[Any],
    ) -> dict[str, Any]:
        """Return vLLM's LogprobsTensors of the requests whose prompt ends in this step, with tails in place of ranks.

        ``hidden_states`` [step's tokens, D]; ``all_token_ids`` [slots, longest]; ``prompt_lens`` [slots].
        """
        pieces, ended = list[_Piece](), list[str]()
        for i, req_id in enumerate(input_batch.req_ids):
            n_prompt = prompt_lens[input_batch.idx_mapping_np[i]]
            # One that was preempted with tokens of its own had its scores before.
            if req_id in self._prompts and n_prompt == input_batch.prefill_len_np[i]:
                pieces += self._pieces(self._prompts[req_id], req_id, i, input_batch)
                done = input_batch.num_computed_prefill_tokens_np[i] + input_batch.num_scheduled_tokens[i]
                ended += [req_id] if done >= n_prompt else []
        if pieces and not self._score(pieces, logits_fn, hidden_states, all_token_ids):
            ended = []
        scored = {req_id: self._prompts.pop(req_id).scored for req_id in ended}
        return {req_id: _join(parts) for req_id, parts in scored.items() if parts}

    @staticmethod
    def _pieces(prompt: _ScoredPrompt, req_id: str, i: int, batch: Any) -> Iterator[_Piece]:
        """Yield the wanted rows of the step's ``i``-th request. The row of a token gives the scores of the next one."""
        first = int(batch.num_computed_prefill_tokens_np[i])
        stop = first + int(batch.num_scheduled_tokens[i])
        offset = int(batch.query_start_loc_np[i]) - first
        for begin, end in prompt.spans:
            low, high = max(begin - 1, first), min(end - 1, stop)
            if low < high:
                yield _Piece(req_id, int(batch.idx_mapping_np[i]), offset + low, offset + high, low + 1)

    def _score(
        self,
        pieces: Sequence[_Piece],
        logits_fn: Callable[[Tensor], Tensor | None],
        hidden_states: Tensor,
        all_token_ids: Tensor,
    ) -> bool:
        """Score all pieces of a step; False where this process does not get the logits."""
        import torch

        (k,) = {self._prompts[piece.req_id].k for piece in pieces}  # the scorer's own requests of one step have one
        rows = torch.cat([hidden_states[piece.start : piece.stop] for piece in pieces])
        counts = [piece.stop - piece.start for piece in pieces]
        token_ids = [all_token_ids[p.slot, p.token : p.token + n] for p, n in zip(pieces, counts, strict=True)]
        tokens = torch.cat([ids.to(rows.device, torch.int64) for ids in token_ids])
        scored: list[Any] = []
        for part, ids in zip(torch.split(rows, HEAD_ROWS), torch.split(tokens, HEAD_ROWS), strict=True):
            logits = logits_fn(part)
            if logits is None:
                return False
            scored += _score(logits, ids, k)
        whole, start = _join(scored), 0
        for piece, n in zip(pieces, counts, strict=True):
            columns = (column[start : start + n] for column in whole[:3])
            self._prompts[piece.req_id].scored.append(type(whole)(*columns))
            start += n
        return True


def _score(logits: Tensor, tokens: Tensor, k: int) -> Iterator[Any]:
    """Yield vLLM's LogprobsTensors of ``tokens`` [n] in ``logits`` [n, V], a few at a time, with tails."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    from gkd.inference.scored_rows import RowShape, score_logits

    shape = RowShape(1.0, logits.shape[-1], k)  # the model itself divides them (gkd.inference.vllm_logits)
    n = max(1, AT_ONCE_BYTES // (4 * shape.rows))
    for part, ids in zip(torch.split(logits, n), torch.split(tokens, n), strict=True):
        rows = score_logits(lambda logits: logits, part, ids, shape)
        tails = torch.zeros_like(rows.token_logprobs) if rows.tails is None else rows.tails
        yield LogprobsTensors(
            torch.cat([ids[:, None].int(), rows.ids], 1),
            torch.cat([rows.token_logprobs[:, None], rows.logprobs], 1),
            tails.view(torch.int32),
        )


def _join(parts: Sequence[Any]) -> Any:
    return type(parts[0]).cat(parts)


def score_spans_alone(model_runner: Any) -> None:
    """Have vLLM's model runner for GPUs score the wanted spans alone."""
    if model_runner.prompt_logprobs_worker is not None:  # where the model's last layers are
        model_runner.prompt_logprobs_worker = SpanLogprobs()


def find_span_rows(n_rows: int, spans: Sequence[tuple[int, int]], n_tokens: int) -> list[slice]:
    """Return where the rows of ``spans`` are among ``n_rows``: these alone, or those of all ``n_tokens`` but the first.

    Rows of a whole prompt are counted from their end, which is that of the last token.
    """
    if n_rows == sum(stop - start for start, stop in spans):
        return [slice(0, n_rows)]
    return [slice(start - n_tokens, stop - n_tokens or None) for start, stop in spans]
