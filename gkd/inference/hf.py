"""Sampling with transformers: for models that vLLM lacks, and for small ones with short responses on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from gkd.config.device import EngineLoad
from gkd.data.tokenizer import load_tokenizer
from gkd.errors import RunFailed
from gkd.inference.decoding import decode, is_decoded_plainly, pad
from gkd.inference.engine import FLOAT_BYTES, NO_PROBABILITY, EngineSpec, ModuleEngine
from gkd.modeling.architecture import exact_attention
from gkd.types import Float32, Int32, Sample, SampleRequest, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.weights.transfer import Bucket


class _Draw:
    """A logits processor: chooses every row's next token and leaves nothing else possible for greedy decoding.

    So each request has a random generator of its own, and only the chosen log-probabilities are kept. ``passed`` is
    called after every forward pass. Rows have ``n_prompt`` tokens before their response.
    """

    def __init__(
        self,
        sampling: Sampling,
        seeds: Sequence[int],
        n_tokens: int,
        n_prompt: int,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        import torch

        self.sampling, self.n_tokens, self.n_prompt, self.passed = sampling, n_tokens, n_prompt, passed
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []  # of each step, [B]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        import torch

        nothing = torch.full_like(scores, -torch.inf, dtype=torch.float32)
        return nothing.scatter(-1, self.choose(input_ids, scores), 0.0)

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the next token of every row, [B, 1]; ``scores`` are logits [B, V], and may be changed."""
        import torch

        from gkd.losses.truncation import truncate_logprobs

        self.passed()
        scores = scores.float()
        if self.n_tokens:
            scores[:, self.n_tokens :] = -torch.inf
        if self.sampling.presence_penalty:
            is_sampled = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, input_ids[:, self.n_prompt :], True)
            scores = scores - self.sampling.presence_penalty * is_sampled
        if self.sampling.temperature == 0:
            logprobs = scores.log_softmax(-1)  # [B, V]
            tokens = logprobs.argmax(-1, keepdim=True)  # [B, 1]
        else:
            logprobs = truncate_logprobs((scores / self.sampling.temperature).log_softmax(-1), self.sampling)
            tokens = self._sample(logprobs)
        self.logprobs.append(logprobs.gather(-1, tokens)[:, 0])
        return tokens

    def _sample(self, logprobs: Tensor) -> Tensor:
        import torch

        # torch.multinomial's own way, to the same tokens: one call for all rows where it would be one of each.
        probabilities = logprobs.exp().cpu()
        if probabilities.sum().isnan():
            raise RunFailed(NO_PROBABILITY)
        noise = torch.empty_like(probabilities)
        for row, generator in zip(noise.unbind(), self.generators, strict=True):
            row.exponential_(generator=generator)
        return (probabilities / noise).argmax(-1, keepdim=True).to(logprobs.device)


class _Stops:
    """A stopping criterion: notes at which length a row's response has one of the texts, which may go over tokens.

    A special token is as good a text as others: base models are prompted with templates that they end turns by.

    ``ends``: tokens of the response by row. Rows have ``n_prompt`` tokens before it.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], n_prompt: int) -> None:
        self.tokenizer, self.texts, self.n_prompt = tokenizer, texts, n_prompt
        self.ends: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        import torch

        new = input_ids[:, self.n_prompt :].tolist()
        for row, tokens in enumerate(new):
            if row not in self.ends:
                written = self.tokenizer.decode(tokens, skip_special_tokens=False)
                if any(text in written for text in self.texts):
                    self.ends[row] = len(tokens)
        done = [row in self.ends for row in range(len(new))]
        return torch.tensor(done, device=input_ids.device)


class HFSampler(ModuleEngine[SampleRequest, Sample]):
    """Batches of requests with equal sampling settings, decoded one after the other, on one GPU."""

    can_sample, continuous = True, False

    def __init__(self, spec: EngineSpec) -> None:
        import torch
        from transformers import GenerationConfig

        from gkd.modeling.reading import read_model

        where = f"model.path={spec.model_path}"
        lm = read_model(spec.model_path, where, getattr(torch, spec.dtype), exact_attention)
        self.model = lm.to(spec.device).eval()
        # A model's own settings (a repetition penalty, a nucleus) would change the distribution that is sampled from.
        self.model.generation_config = GenerationConfig()
        self.info, self.device, self.max_batch = spec.model, spec.device, spec.settings.slots
        self.eos_ids = spec.model.eos_ids
        self.tokenizer = load_tokenizer(spec.model_path) if spec.stops else None
        self.waiting: list[tuple[int, SampleRequest]] = []
        self._is_plain = is_decoded_plainly(self.model)
        self._as_in_files = False
        """Whether the model holds its weights under the names and in the shapes of its files; known after a push."""

    @classmethod
    def memory(cls, load: EngineLoad) -> dict[str, float]:
        """Count a cache for every sequence of a batch at full length, and their float32 logits."""
        return {
            "weights": float(load.dtype_bytes * load.n_parameters),
            "key-value cache": float(load.n_sequences * load.longest * load.kv_bytes),
            "logits": float(3 * load.n_sequences * load.vocabulary * FLOAT_BYTES),
        }

    def add(self, key: int, request: SampleRequest) -> None:
        """Queue a request. Raises ValueError when it is longer than the model's positions."""
        limit = self.info.positions
        length = len(request.prompt.token_ids) + request.sampling.max_tokens
        if limit is not None and length > limit:
            raise ValueError(f"prompt and response of {length} tokens exceed the model's {limit} positions")
        self.waiting.append((key, request))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are queued."""
        return bool(self.waiting)

    def step(self) -> list[tuple[int, Sample]]:
        """Generate for the queued requests that share the sampling settings of the first."""
        import torch

        if not self.waiting:
            return []
        sampling = self.waiting[0][1].sampling
        batch = [w for w in self.waiting if w[1].sampling == sampling][: self.max_batch]
        keys = {key for key, _ in batch}
        self.waiting = [w for w in self.waiting if w[0] not in keys]
        with torch.no_grad():
            return self._generate(batch, sampling)

    def _generate(self, batch: list[tuple[int, SampleRequest]], sampling: Sampling) -> list[tuple[int, Sample]]:
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        end = self.eos_ids[0] if self.eos_ids else 0
        ids, mask = pad([r.prompt.token_ids for _, r in batch], end, "left")  # generation goes on at the right
        longest = ids.shape[1]
        draw = _Draw(sampling, [request.seed for _, request in batch], self.info.n_tokens, longest, self._count)
        stops = _Stops(self.tokenizer, sampling.stop, longest) if sampling.stop else None
        ids, mask = ids.to(self.device), mask.to(self.device)
        if self._is_plain:
            responses = decode(self.model, ids, mask, sampling.max_tokens, draw.choose, self.eos_ids, stops)
        else:
            responses = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=None if stops is None else StoppingCriteriaList([stops]),
                eos_token_id=self.eos_ids or None,
                pad_token_id=end,
            )[:, longest:]
        new = responses.cpu().numpy().astype(np.int32)  # [B, T]
        logprobs = torch.stack(draw.logprobs, 1).cpu().numpy()  # [B, T]
        is_end = np.isin(new, self.eos_ids)
        ends = np.where(is_end.any(1), is_end.argmax(1), -1).tolist()  # of each row; -1: none
        stopped = {} if stops is None else stops.ends
        return [
            (key, self._finish(request, new[row], logprobs[row], ends[row], stopped.get(row)))
            for row, (key, request) in enumerate(batch)
        ]

    def _count(self) -> None:
        self.forward_passes += 1

    def _finish(
        self, request: SampleRequest, tokens: Int32, logprobs: Float32, end: int, stopped: int | None
    ) -> Sample:
        """Return what was generated up to the first end token, at ``end``, or -1 without one.

        ``stopped``: tokens up to a text that ends it.
        """
        length = min(end + 1 or len(tokens), stopped or len(tokens))
        return Sample.single_turn(
            request,
            tokens[:length],
            logprobs[:length],
            self.version,
            "stop" if stopped or end >= 0 else "length",
        )

    def load_weights(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        """Collect the buckets of the weights, and with the last one copy them into the model.

        Raises RuntimeError unless they fit. transformers reads them as it would read the files, so that what it
        converts while loading is converted; where that was nothing, later ones are copied.
        """
        import torch

        if bucket.number == 0:
            self._incoming: dict[str, Tensor] = {}
        self._incoming |= tensors
        if not bucket.last:
            return
        state, self._incoming = self._incoming, {}
        model_state = self.model.state_dict()
        if not (self._as_in_files and _covers(state, model_state)):
            self.model.load_state_dict(self._convert(bucket, state))
            self._as_in_files = _covers(state, model_state) and all(
                torch.equal(model_state[n], t.to(model_state[n])) for n, t in state.items()
            )
            return
        with torch.no_grad():
            for name, tensor in state.items():
                model_state[name].copy_(tensor)

    def _convert(self, bucket: Bucket, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights as transformers reads them from files with ``state``. Raises RuntimeError unless they fit."""
        with _silence():
            loaded, report = type(self.model).from_pretrained(
                None, config=self.model.config, state_dict=state, dtype=self.model.dtype, output_loading_info=True
            )
        for problem in ("unexpected", "missing", "mismatched"):
            if names := sorted(map(str, report[f"{problem}_keys"])):
                raise RuntimeError(
                    f"weights version {bucket.version}: {names[0]} is {problem} ({len(names)} tensors in all)"
                )
        converted: dict[str, Tensor] = loaded.state_dict()
        return converted


def _covers(state: dict[str, Tensor], model_state: dict[str, Tensor]) -> bool:
    """Return whether ``state`` has all of ``model_state``, by name or as the same memory as one that it has, and no
    others.
    """
    if any(name not in model_state or model_state[name].shape != tensor.shape for name, tensor in state.items()):
        return False
    addresses = {model_state[name].data_ptr() for name in state}
    return all(name in state or tensor.data_ptr() in addresses for name, tensor in model_state.items())


@contextmanager
def _silence() -> Iterator[None]:
    """Silence transformers' bar of progress and its report of keys, which are for a person who loads a model once."""
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        get_verbosity,
        is_progress_bar_enabled,
        set_verbosity,
        set_verbosity_error,
    )

    shown, verbosity = is_progress_bar_enabled(), get_verbosity()
    disable_progress_bar()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if shown:
            enable_progress_bar()
