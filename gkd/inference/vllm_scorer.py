"""A vLLM engine that scores.

vLLM gives, with ``prompt_logprobs=K``, one row of K + 1 entries for every prompt token but the first: the token itself,
then the K most likely ones in falling order (the token once more when it is among them). A Target is therefore a slice
of them for each span of positions; on GPUs no others are scored (:mod:`gkd.inference.vllm_spans`). Five things are not
as one would expect:

- ``flat_logprobs`` still takes the rows apart number by number, into Python lists, for every prompt token; see
  :meth:`VLLMScorer._tap`.
- Scores of prompt tokens ignore ``SamplingParams.temperature``; :class:`gkd.inference.vllm_logits.Shape` divides the
  logits themselves.
- Rows of tokens that come from the prefix cache are missing, so vLLM has scored requests read it on request alone.
  They do where the prompt is most of a sequence, and are repeated without where a hit reaches into the response, as
  those of a prompt of whole blocks always would.
- The probability of all other tokens is in no row; :mod:`gkd.inference.tail` puts it where vLLM puts ranks.
- One token has to be sampled, and needs room, though nobody reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gkd.config.device import GIB, RESULT_ENTRY_BYTES, Device
from gkd.errors import RunFailed, describe_error, one_line
from gkd.inference.engine import EngineSpec
from gkd.inference.requests import GenerateRequest, RequestRejected, ScoreRequest
from gkd.inference.tail import tails_instead_of_ranks, tails_of
from gkd.inference.vllm_lifecycle import Follower, VLLMEngine, engine_arguments, start_llm
from gkd.inference.vllm_logits import Shape
from gkd.inference.vllm_spans import find_span_rows, spans_argument
from gkd.types import Int32, Target

if TYPE_CHECKING:
    import torch

    from gkd.config import Scorer

RESULT_BYTES = 2 * GIB  # results of requests in the engine, prompt rows included; not part of vLLM's own budget
LOGIT_BYTES = GIB  # float32 logits of one step on a CPU, where vLLM makes those of a whole prompt at once
ROW_BYTES = 2 * GIB  # top K of all tokens of one step on a GPU, not in vLLM's budget either; more for many sequences
# Part of a sequence that its prompt is, from which on the prompt is read from the cache. Samples of one prompt often
# begin alike, and then one costs a second, whole pass: reading pays where fewer than this part of them do.
CACHED_PART = 2 / 3


@dataclass(slots=True)
class _RunningRequest:
    """A request in vLLM, and the tensors of its rows as they come, prefill chunk by chunk."""

    request: ScoreRequest | GenerateRequest
    bytes: int
    reads_cache: bool = False
    rows: list[Any] = field(default_factory=list)


def scoring_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that scores. Raises ConfigError for too long sequences."""
    spec.require_positions()
    longest: int | None = spec.settings.max_model_len
    if spec.max_num_batched_tokens is None:
        spec = replace(
            spec, max_num_batched_tokens=VLLMScorer.batched_tokens(spec.model.vocabulary, spec.settings, spec.device)
        )
    arguments = engine_arguments(spec, None if longest is None else longest + 1)
    name: str | None = spec.settings.quantization
    return arguments if name is None else {**arguments, "quantization": name}


class VLLMScorer(VLLMEngine[ScoreRequest | GenerateRequest, Target | Int32]):
    """Scores and continues token sequences.

    Requests of one temperature, vocabulary and K run together; others wait until those are done. The process'
    environment is that of :func:`gkd.cluster.workers.environment.environment`. Raises ConfigError when
    ``settings.max_model_len`` is more than the model has, RunFailed when vLLM does not start on it.
    """

    can_score = quantizes = True
    scores_every_token = frozenset({"cpu"})
    result_bytes = RESULT_BYTES

    @classmethod
    def batched_tokens(cls, vocabulary: int, settings: Scorer, device: Device) -> int | None:
        """Return the tokens of a step whose logits, or top K, fit beside what vLLM plans; None: vLLM's own number."""
        if device == "cpu":
            most = 4096
            fitting = LOGIT_BYTES // (4 * vocabulary)
        else:
            most = 8192  # vLLM's own, twice that on a large card
            fitting = ROW_BYTES // cls.top_k_bytes(1, min(settings.max_top_k, vocabulary))
            if fitting >= 2 * most:
                return None
        return max(settings.max_num_seqs, 256, min(most, fitting))

    @classmethod
    def top_k_bytes(cls, tokens: int, k: int) -> int:
        """Return what the top ``k`` of a step of so many tokens take: in parts, and put together."""
        return 2 * super().top_k_bytes(tokens, k)

    def __init__(self, spec: EngineSpec) -> None:
        arguments, self.device = scoring_arguments(spec), spec.device
        try:
            self.llm_engine = start_llm(arguments, spec.device).llm_engine
        except Exception as error:
            method = spec.settings.quantization
            how = "" if method is None else f" with {spec.section}.quantization={method} in {spec.dtype} (model.dtype)"
            failure = f"the {spec.name}'s engine did not start on {spec.model_path}{how}"
            raise RunFailed(f"{failure}: {describe_error(error)}") from error
        self.llm_engine.collective_rpc(tails_instead_of_ranks)
        self._stop_ids = spec.model.eos_ids
        self.limits = spec.limits(self.llm_engine.model_config.max_model_len - 1)
        self._shape, self._top_k = Shape(), 0
        self._waiting: deque[tuple[int, ScoreRequest | GenerateRequest]] = deque()
        self._running: dict[int, _RunningRequest] = {}

    @classmethod
    def follow(cls, spec: EngineSpec) -> Follower:
        """Return vLLM's processes on a further node of the engine with ``spec``."""
        return Follower(scoring_arguments(spec))

    def add(self, key: int, request: ScoreRequest | GenerateRequest) -> None:
        """Queue a request that passed ``limits.check``."""
        self._waiting.append((key, request))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished."""
        return bool(self._waiting or self._running)

    def step(self) -> Iterator[tuple[int, Target | Int32 | RequestRejected]]:
        """Do one forward pass; returns the keys and answers of requests that it finished."""
        yield from self._admit()
        for output in self.llm_engine.step():
            if not output.finished:
                continue
            key = int(output.request_id)
            running = self._running.pop(key)
            if isinstance(running.request, ScoreRequest):
                if running.reads_cache and lacks_rows(running.request, running.rows, output.num_cached_tokens or 0):
                    self._start(key, running.request, reads_cache=False)
                    continue
                whole = self.limits.width(running.request) == self.limits.rows(running.request)
                yield key, _target(running.request, running.rows, whole)
            else:
                yield key, np.asarray(output.outputs[0].token_ids, np.int32)

    def _admit(self) -> Iterator[tuple[int, RequestRejected]]:
        """Hand to vLLM what may run now, in order, so that no temperature waits for ever."""
        while self._waiting:
            key, request = self._waiting[0]
            if self._running and not self._fits(request):
                return
            self._waiting.popleft()
            try:
                self._start(key, request)
            except ValueError as error:
                yield key, RequestRejected("bad_request", one_line(error))

    def _fits(self, request: ScoreRequest | GenerateRequest) -> bool:
        """Return whether ``request`` may join those that run: same shape and K, and memory for its results."""
        if not isinstance(request, ScoreRequest):
            return True  # greedy: no temperature and hardly a result
        # On a GPU vLLM takes the largest K of a step for all its rows, and the tail is what that leaves out.
        if (Shape(request.temperature, request.vocabulary), self.limits.width(request)) != (self._shape, self._top_k):
            return False
        return sum(running.bytes for running in self._running.values()) + self._bytes(request) <= RESULT_BYTES

    def _bytes(self, request: ScoreRequest) -> int:
        return len(request.token_ids) * (self.limits.width(request) + 1) * RESULT_ENTRY_BYTES

    def _start(self, key: int, request: ScoreRequest | GenerateRequest, reads_cache: bool = True) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if isinstance(request, GenerateRequest):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                stop_token_ids=self._stop_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.llm_engine.add_request(str(key), tokens_input(request.prompt_ids.tolist()), params)
            self._running[key] = _RunningRequest(request, 0)
            return
        shape = Shape(request.temperature, request.vocabulary)
        if shape != self._shape:
            self.llm_engine.apply_model(shape.put_on)
            self._shape = shape
        self._top_k = self.limits.width(request)
        reads_cache = reads_cache and self._gains_by_cache(request)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not reads_cache,
            extra_args=spans_argument(request.spans),
        )
        internal = self.llm_engine.add_request(str(key), tokens_input(request.token_ids.tolist()), params)
        self._running[key] = running = _RunningRequest(request, self._bytes(request), reads_cache)
        self._tap(internal, running.rows)

    def _gains_by_cache(self, request: ScoreRequest) -> bool:
        """Return whether most of a sequence is its prompt, of which the last token, of the first row, is computed."""
        n_prompt, block = request.spans[0][0], self.llm_engine.vllm_config.cache_config.block_size
        return n_prompt >= CACHED_PART * len(request.token_ids) and n_prompt % block != 0

    def _tap(self, internal: str, rows: list[Any]) -> None:
        """Have the tensors of a request's rows put into ``rows`` instead of being taken apart.

        vLLM would append every number to a Python list, four appends an entry, before anybody could slice.
        """
        processor = self.llm_engine.output_processor.request_states[internal].logprobs_processor
        assert callable(processor._update_prompt_logprobs), "vLLM has changed"
        processor._update_prompt_logprobs = rows.append


def lacks_rows(request: ScoreRequest, chunks: Sequence[Any], n_cached: int) -> bool:
    """Return whether the cache had ``n_cached`` tokens that were to be scored, or more than those after a preemption.

    Of what a request found in the cache when it went on again vLLM keeps no count; its rows are missing.
    """
    n_wanted = sum(stop - start for start, stop in request.spans)
    return n_cached >= request.spans[0][0] or sum(len(chunk.logprobs) for chunk in chunks) < n_wanted


def _target(request: ScoreRequest, chunks: list[Any], whole: bool) -> Target:
    """Return a scored request's Target from vLLM's LogprobsTensors, one of each prefill chunk or of the whole prompt.

    ``whole``: there is no token beyond the top K.
    """
    n_rows = sum(len(chunk.logprobs) for chunk in chunks)
    places = find_span_rows(n_rows, request.spans, len(request.token_ids))
    ids = _rows([chunk.logprob_token_ids for chunk in chunks], places)
    logprobs = _rows([chunk.logprobs for chunk in chunks], places)
    tokens = np.concatenate([request.token_ids[start:stop] for start, stop in request.spans])
    if not np.array_equal(ids[:, 0], tokens):
        raise RunFailed("vLLM's rows are not those of the scored tokens: this version orders them differently")
    return Target(
        np.ascontiguousarray(logprobs[:, 0]),
        np.ascontiguousarray(ids[:, 1:], np.int32),
        np.ascontiguousarray(logprobs[:, 1:]),
        request.temperature,
        None if whole or not request.top_k else _rows([tails_of(chunk) for chunk in chunks], places),
    )


def _rows(chunks: list[torch.Tensor], places: list[slice]) -> NDArray[Any]:
    """Return the rows at ``places`` of tensors [rows, ...] put end to end; a view where both are one."""
    whole = np.concatenate([chunk.numpy() for chunk in chunks]) if len(chunks) > 1 else chunks[0].numpy()
    return whole[places[0]] if len(places) == 1 else np.concatenate([whole[place] for place in places])
