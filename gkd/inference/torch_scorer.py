"""Scoring with transformers: sequences laid end to end through one forward pass, without a cache or a scheduler.

Only positions that are to be scored go through the head, and what sequences begin with before these is computed once
for those that begin alike, as samples of one prompt do. On one thread of a CPU the numbers of a sequence do not depend
on what is scored along with it, to the last bit, so that a run repeats whatever comes first: linear layers are packed
(gkd.modeling.linear), and only sequences that attention pads alike share a pass. Sums over experts do depend on it, and
models of which some layers take rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gkd.config.device import RESULT_ENTRY_BYTES, EngineLoad
from gkd.errors import ConfigError, RunFailed, describe_error
from gkd.inference.decoding import pad
from gkd.inference.engine import FLOAT_BYTES, EngineSpec, ModuleEngine
from gkd.inference.requests import GenerateRequest, RequestRejected, ScoreRequest
from gkd.modeling.layout import PackSize, SequenceLayout
from gkd.types import Int32, Target

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from gkd.inference.scored_rows import ScoredRows, SumRows

UNBOUNDED_LENGTH = 1 << 20
"""Longest sequence of a model without a limit of its own."""
PADDED_TO = 32
"""On a CPU attention is over so many positions, or a multiple."""


@dataclass(frozen=True, slots=True)
class _RequestRows:
    """A request's share of a pass: its positions from ``start`` to ``stop`` in ``rows``."""

    key: int
    request: ScoreRequest
    rows: ScoredRows
    start: int
    stop: int

    def target(self) -> Target:
        """Return the answer. The device has to be done."""
        row_slice = slice(self.start, self.stop)
        tails = None if self.rows.tails is None else self.rows.tails[row_slice].numpy()
        return Target(
            self.rows.token_logprobs[row_slice].numpy(),
            self.rows.ids[row_slice].numpy(),
            self.rows.logprobs[row_slice].numpy(),
            self.request.temperature,
            tails,
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass that a device was given; ``done``: when it has got so far, None where it has already."""

    scored: Sequence[_RequestRows] = ()
    done: torch.cuda.Event | None = None

    def answers(self) -> Iterator[tuple[int, Target]]:
        """Wait for the device, and yield the keys and targets."""
        if self.done is not None:
            self.done.synchronize()
        for scored in self.scored:
            yield scored.key, scored.target()


class TorchScorer(ModuleEngine[ScoreRequest | GenerateRequest, Target | Int32]):
    """Scores and continues token sequences on one GPU or the CPU; what waits is scored in one forward pass.

    Requests of any temperature, vocabulary and K share a pass. On a GPU the next pass is given to the device before the
    answers of the last are taken apart. Raises ConfigError when ``settings.max_model_len`` is more than the model has,
    RunFailed when the model cannot be loaded.
    """

    can_score = True
    compiled_speed = 1.9  # 81,920 tokens of a 1.5B in 0.55 s on an H200; 0.83 s with enforce_eager

    def __init__(self, spec: EngineSpec) -> None:
        spec.require_positions()
        self.device, self._stop_ids = spec.device, spec.model.eos_ids
        self._n_tokens = spec.max_num_batched_tokens or self.pass_tokens[spec.device]
        self.model = _load(spec)
        from gkd.modeling.attention import can_share_beginnings
        from gkd.modeling.backbone import is_packed, takes_rows
        from gkd.modeling.head import Head

        self._takes_rows = takes_rows(self.model)
        self._shares_prompts = is_packed(self.model) and can_share_beginnings(spec.device)
        self._head = Head(self.model)
        self._sums = _compile(self.model, spec)
        self.limits = spec.limits(spec.settings.max_model_len or spec.model.positions or UNBOUNDED_LENGTH)
        self._waiting: deque[tuple[int, ScoreRequest | GenerateRequest]] = deque()
        self._overlaps, self._flying = spec.device == "cuda", _Pass()

    @classmethod
    def memory(cls, load: EngineLoad) -> dict[str, float]:
        """Count one forward pass with the head on some positions of it; on a CPU also the results.

        A tied head there has a copy of its weight in another layout.
        """
        on_cpu = load.device == "cpu"
        n_tokens = max(load.longest, min(cls.pass_tokens[load.device], load.n_sequences * load.longest))
        n_positions = n_tokens * load.scored
        # In float32: logits and a temporary of their logsumexp, ids of 8 bytes and log-probabilities of the top K.
        copies = 2 + 3 * min(1.0, load.top_k / load.vocabulary)
        logits = copies * min(cls.logit_bytes[load.device], n_positions * load.vocabulary * FLOAT_BYTES)
        activations = max(n_tokens * load.pass_bytes, n_tokens * load.hidden * load.dtype_bytes + logits)
        copied = load.head if load.tied and on_cpu else 0
        results = n_positions * (load.top_k + 1) * RESULT_ENTRY_BYTES
        return {
            "weights": float(load.dtype_bytes * (load.n_parameters + copied)),
            "activations": float(activations),
        } | ({"results": float(results)} if on_cpu else {})

    def add(self, key: int, request: ScoreRequest | GenerateRequest) -> None:
        """Queue a request that passed ``limits.check``."""
        self._waiting.append((key, request))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished."""
        return bool(self._waiting or self._flying.scored)

    def step(self) -> Iterator[tuple[int, Target | Int32 | RequestRejected]]:
        """Run one forward pass, or continue prompts; yields the keys and answers of requests that are finished."""
        begun = self._begin(self._take_scores())
        if self._overlaps:
            begun, self._flying = self._flying, begun
        yield from begun.answers()
        if prompts := self._take_prompts():
            yield from self._continue(prompts)

    def _take_scores(self) -> list[tuple[int, ScoreRequest]]:
        """Take the sequences of the next pass, the one that has waited longest first."""
        batch: list[tuple[int, ScoreRequest]] = []
        remaining: deque[tuple[int, ScoreRequest | GenerateRequest]] = deque()
        size, longest = PackSize(), 0
        for key, request in self._waiting:
            if isinstance(request, ScoreRequest) and (not batch or self._joins(request, batch, size, longest)):
                batch.append((key, request))
                size.add(*self._describe(request))
                longest = max(longest, self._row_length(request))
            else:
                remaining.append((key, request))
        self._waiting = remaining
        return batch

    def _joins(
        self, request: ScoreRequest, batch: Sequence[tuple[int, ScoreRequest]], size: PackSize, longest: int
    ) -> bool:
        """Return whether there is room for ``request`` beside the ``batch``, padded where the model takes rows."""
        length = self._row_length(request)
        if self.device != "cuda" and length != longest:
            return False
        if self._takes_rows:
            return (len(batch) + 1) * max(longest, length) <= self._n_tokens
        # Asked first: to read what each of thousands begins with takes ten times as long, at every step.
        might = size.might_have_room(self._n_tokens, len(request.token_ids), self._count_shared(request))
        return might and size.has_room(self._n_tokens, *self._describe(request))

    def _describe(self, request: ScoreRequest) -> tuple[int, bytes, int]:
        """Return what a sequence is long, what it begins with, and how much of that others may have as well."""
        n_shared = self._count_shared(request)
        return len(request.token_ids), request.token_ids[:n_shared].tobytes(), n_shared

    def _count_shared(self, request: ScoreRequest) -> int:
        """Return how many tokens come before the first that is scored."""
        return request.spans[0][0] if self._shares_prompts else 0

    def _row_length(self, request: ScoreRequest) -> int:
        """Return the positions of a row of attention: on a CPU padded, by the length of ``request`` alone."""
        length = len(request.token_ids)
        return length if self.device == "cuda" else min(-(-length // PADDED_TO) * PADDED_TO, self.limits.max_length)

    def _begin(self, batch: list[tuple[int, ScoreRequest]]) -> _Pass:
        """Give the device the forward pass of some sequences."""
        if not batch:
            return _Pass()
        import torch

        with torch.inference_mode(), self._control_compiling():
            scored = self._score(batch)
            if self.device != "cuda":
                return _Pass(scored)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return _Pass(scored, event)

    @contextmanager
    def _control_compiling(self, allowed: bool = True) -> Iterator[None]:
        """Have torch compile what it meets here for the first time, or compute it all as it is; without, nothing."""
        if self._sums is None:
            yield
            return
        import torch

        from gkd.modeling.compiling import allow_compiling

        with allow_compiling(strict=False) if allowed else torch.compiler.set_stance("force_eager"):
            yield

    def _score(self, batch: list[tuple[int, ScoreRequest]]) -> list[_RequestRows]:
        import torch

        from gkd.inference.scored_rows import RowShape, score_rows
        from gkd.modeling.backbone import hidden_states
        from gkd.modeling.sequences import PackedSequences

        self.forward_passes += 1
        requests = [request for _, request in batch]
        layout = SequenceLayout([request.token_ids for request in requests], list(map(self._count_shared, requests)))
        if self.device != "cuda":
            layout.max_seqlen = max(map(self._row_length, requests))
        packed = PackedSequences.from_layout(layout).to(self._to_device)
        hidden = hidden_states(self.model, packed)
        by_shape: dict[RowShape, list[int]] = {}
        for i, request in enumerate(requests):
            shape = RowShape(request.temperature, self.limits.rows(request), self.limits.width(request))
            by_shape.setdefault(shape, []).append(i)
        scored: list[_RequestRows] = []
        for shape, members in by_shape.items():
            positions = [np.concatenate([np.arange(*span) for span in requests[i].spans]) for i in members]
            at = [layout.locate(i, indices) for i, indices in zip(members, positions, strict=True)]
            before = [layout.locate(i, indices - 1) for i, indices in zip(members, positions, strict=True)]
            ids, above = (self._to_device(torch.from_numpy(np.concatenate(places))) for places in (at, before))
            ids, above = packed.token_ids[ids], hidden[above]
            rows = score_rows(self._head, above, ids, shape, self.logit_bytes[self.device], self._sums)
            ends = np.cumsum([len(indices) for indices in positions]).tolist()
            for i, indices, end in zip(members, positions, ends, strict=True):
                scored.append(_RequestRows(*batch[i], rows, end - len(indices), end))
        return scored

    def _to_device(self, tensor: Tensor) -> Tensor:
        import torch

        from gkd.losses.targets import send

        return send(tensor, torch.device(self.device))

    def _take_prompts(self) -> list[tuple[int, GenerateRequest]]:
        """Take the prompts that are continued together, once one of them has waited longest: all that the model takes
        as long as the longest of them becomes when it has as many tokens as any.
        """
        batch: list[tuple[int, GenerateRequest]] = []
        if not self._waiting or isinstance(self._waiting[0][1], ScoreRequest):
            return batch
        remaining: deque[tuple[int, ScoreRequest | GenerateRequest]] = deque()
        longest = most = 0
        for key, request in self._waiting:
            if isinstance(request, ScoreRequest):
                remaining.append((key, request))
                continue
            lengths = max(longest, len(request.prompt_ids)), max(most, request.max_tokens)
            if batch and sum(lengths) > self.limits.max_length:
                remaining.append((key, request))
            else:
                batch.append((key, request))
                longest, most = lengths
        self._waiting = remaining
        return batch

    def _continue(self, batch: list[tuple[int, GenerateRequest]]) -> Iterator[tuple[int, Int32]]:
        """Decode greedily, prompts padded on the left."""
        import torch

        from gkd.modeling.backbone import use_padded_rows

        def note_pass(ids: Tensor, *_: object, **__: object) -> Tensor:
            self.forward_passes += 1  # by which others see that it gets on
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        end = self._stop_ids[0] if self._stop_ids else 0
        ids, mask = pad([request.prompt_ids for _, request in batch], end, "left")
        # Decoding has another shape at every token.
        with torch.inference_mode(), use_padded_rows(self.model), self._control_compiling(allowed=False):
            sequences = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=max(request.max_tokens for _, request in batch),
                do_sample=False,
                eos_token_id=self._stop_ids or None,
                pad_token_id=end,
                stopping_criteria=[note_pass],
            )
        new: Int32 = sequences[:, ids.shape[1] :].cpu().numpy().astype(np.int32)
        for (key, request), row in zip(batch, new, strict=True):
            ends = np.flatnonzero(np.isin(row, self._stop_ids))
            yield key, row[: min(request.max_tokens, int(ends[0]) + 1 if len(ends) else len(row))]


def _compile(lm: PreTrainedModel, spec: EngineSpec) -> SumRows | None:
    """Have the layers of ``lm`` run as fewer kernels on a GPU; returns ``sum_rows``, compiled.

    None where they are left as they are: ``enforce_eager``, models that are small, take rows or are not dense, and
    machines on which torch cannot compile.
    """
    if spec.device == "cpu" or spec.settings.enforce_eager:
        return None
    import torch

    from gkd.inference.scored_rows import sum_rows
    from gkd.modeling.compiling import CompileSetting, compile_function, compile_layers

    name = f"{spec.section}.enforce_eager"
    setting = CompileSetting(spec.name, "auto", f"{name}=false", f"{name}=true computes without")
    if not compile_layers(lm, setting, torch.device(spec.device)):
        return None
    sums: SumRows = compile_function(sum_rows, dynamic=None)
    return sums


def _load(spec: EngineSpec) -> PreTrainedModel:
    """Read the model in ``spec.model_path`` and have it score.

    Raises ConfigError for weights that are not all there and models that cannot be computed, RunFailed where it cannot
    be done otherwise.
    """
    import torch
    from transformers import GenerationConfig

    from gkd.modeling.backbone import choose_attention, pack_or_pad, takes_rows
    from gkd.modeling.linear import pack_linear_layers
    from gkd.modeling.reading import read_model

    failure = f"the {spec.name}'s engine did not start on {spec.model_path}"
    try:
        lm = read_model(spec.model_path, failure, getattr(torch, spec.dtype), choose_attention).to(spec.device).eval()
    except ConfigError:
        raise
    except Exception as error:  # transformers and torch raise whatever they meet
        raise RunFailed(f"{failure}: {describe_error(error)}") from error
    lm.requires_grad_(False)
    # A model's own settings, such as a repetition penalty, would change what is the most likely token.
    lm.generation_config = GenerationConfig()
    pack_or_pad(lm, f"{spec.section}.model.path={spec.model_path}")
    if spec.device == "cpu" and not takes_rows(lm):  # others, such as Mamba, compute with weights beside their layers
        pack_linear_layers(lm)
    return lm
