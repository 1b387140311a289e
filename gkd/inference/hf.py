"""Sampling with transformers' generate: slow, for models that vLLM does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TopPLogitsWarper,
)
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    get_verbosity,
    is_progress_bar_enabled,
    set_verbosity,
    set_verbosity_error,
)

from gkd.data.model_info import ModelInfo, exact_attention
from gkd.types import Sample, SampleRequest, Sampling


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Chooses every row's next token and leaves nothing else possible, so that greedy decoding takes it.

    So each request has a random generator of its own, and only the chosen log-probabilities are kept. ``passed`` is
    called after every forward pass.
    """

    def __init__(
        self, sampling: Sampling, seeds: Sequence[int], n_tokens: int, passed: Callable[[], None] = lambda: None
    ) -> None:
        self.sampling, self.n_tokens, self.passed = sampling, n_tokens, passed
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.nucleus = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1.0 else None
        self.logprobs: list[Tensor] = []  # of each step, [B]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.passed()
        scores = scores.float()
        if self.n_tokens:
            scores[:, self.n_tokens :] = -torch.inf
        greedy = self.sampling.temperature == 0
        if not greedy:
            scores = scores / self.sampling.temperature
            scores = scores if self.nucleus is None else self.nucleus(input_ids, scores)
        logprobs = scores.log_softmax(-1)  # [B, V]
        chosen = logprobs.argmax(-1, keepdim=True) if greedy else self._sample(logprobs)  # [B, 1]
        self.logprobs.append(logprobs.gather(-1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)

    def _sample(self, logprobs: Tensor) -> Tensor:
        probabilities = logprobs.exp().cpu()
        drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, self.generators, strict=True)]
        return torch.stack(drawn).to(logprobs.device)


class HFEngine:
    """Batches of requests with equal sampling settings, one ``generate`` call each."""

    def __init__(self, model_path: str, model: ModelInfo, device: str, dtype: torch.dtype, max_batch: int) -> None:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        lm = AutoModelForCausalLM.from_pretrained(
            model_path, config=config, dtype=dtype, attn_implementation=exact_attention(config), local_files_only=True
        )
        self.model = lm.to(device).eval()
        # A model's own settings (a repetition penalty, a nucleus) would change the distribution that is sampled from.
        self.model.generation_config = GenerationConfig()
        self.checkpoint, self.device, self.max_batch = model, device, max_batch
        self.eos_ids = model.eos_ids
        self.waiting: list[SampleRequest] = []
        self.forward_passes = self.version = 0

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises ValueError when it is longer than the model's positions."""
        limit = self.checkpoint.positions
        length = len(request.prompt.token_ids) + request.sampling.max_tokens
        if limit is not None and length > limit:
            raise ValueError(f"prompt and response of {length} tokens exceed the model's {limit} positions")
        self.waiting.append(request)

    def busy(self) -> bool:
        """Whether requests are queued."""
        return bool(self.waiting)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Generate for the queued requests that share the sampling settings of the first."""
        if not self.waiting:
            return []
        sampling = self.waiting[0].sampling
        chosen = [request for request in self.waiting if request.sampling == sampling][: self.max_batch]
        keys = {request.key for request in chosen}
        self.waiting = [request for request in self.waiting if request.key not in keys]
        return self._generate(chosen, sampling)

    def _generate(self, chosen: list[SampleRequest], sampling: Sampling) -> list[Sample]:
        prompts = [torch.from_numpy(r.prompt.token_ids.astype(np.int64)) for r in chosen]
        longest = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), longest), self.eos_ids[0] if self.eos_ids else 0)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padding on the left: generation goes on at the right
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        draw = _Draw(sampling, [request.seed for request in chosen], self.checkpoint.n_tokens, self._count)
        sequences = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            logits_processor=LogitsProcessorList([draw]),
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.eos_ids[0] if self.eos_ids else 0,
        )
        new = sequences[:, longest:]  # [B, T]
        logprobs = torch.stack(draw.logprobs, 1)  # [B, T]
        return [self._finish(request, new[row], logprobs[row]) for row, request in enumerate(chosen)]

    def _count(self) -> None:
        self.forward_passes += 1

    def _finish(self, request: SampleRequest, tokens: Tensor, logprobs: Tensor) -> Sample:
        ends = torch.isin(tokens, torch.tensor(self.eos_ids, device=tokens.device)).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        return Sample.single_turn(
            request,
            tokens[:length].cpu().numpy().astype(np.int32),
            logprobs[:length].cpu().numpy().astype(np.float32),
            self.version,
            "stop" if len(ends) else "length",
        )

    def sleep(self) -> None:
        """Move the model to the host."""
        self.model.to("cpu")
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def wake(self, weights_only: bool) -> None:
        """Move it back. There is nothing but weights."""
        self.model.to(self.device)

    def load_weights(self, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
        """Copy the weights into the model, which come by the names that its files have; RuntimeError unless they fit.

        transformers reads them as it would read the files, so that what it converts while loading is converted.
        """
        state = {name: tensor for piece in pieces for name, tensor in piece.items()}
        with _quietly():
            loaded, found = type(self.model).from_pretrained(
                None, config=self.model.config, state_dict=state, dtype=self.model.dtype, output_loading_info=True
            )
        for problem in ("unexpected", "missing", "mismatched"):
            if names := sorted(map(str, found[f"{problem}_keys"])):
                raise RuntimeError(f"weights version {version}: {names[0]} is {problem} ({len(names)} tensors in all)")
        self.model.load_state_dict(loaded.state_dict())
        self.version = version


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bar of progress and its report of keys, which are for a person who loads a model once."""
    shown, verbosity = is_progress_bar_enabled(), get_verbosity()
    disable_progress_bar()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if shown:
            enable_progress_bar()
