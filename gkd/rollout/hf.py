"""Sampling with transformers' generate: slow, for models that vLLM does not know."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gkd.rollout.engine import Finished
from gkd.sample import Request, Sampling


class HFEngine:
    """Batches of requests with equal sampling settings, one ``generate`` call each."""

    def __init__(self, model_path: str, eos_ids: list[int], device: str, dtype: torch.dtype, max_batch: int) -> None:
        self.model = (
            AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True).to(device).eval()
        )
        self.eos_ids, self.device, self.max_batch = eos_ids, device, max_batch
        self.waiting: list[tuple[int, Request]] = []

    def add(self, key: int, request: Request) -> None:
        """Queue a request. Raises ValueError when it is longer than the model's positions."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        length = len(request.prompt.token_ids) + request.sampling.max_tokens
        if limit is not None and length > limit:
            raise ValueError(f"prompt and response of {length} tokens exceed the model's {limit} positions")
        self.waiting.append((key, request))

    def busy(self) -> bool:
        """Whether requests are queued."""
        return bool(self.waiting)

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Generate for the queued requests that share the sampling settings of the first."""
        if not self.waiting:
            return []
        sampling = self.waiting[0][1].sampling
        chosen = [w for w in self.waiting if w[1].sampling == sampling][: self.max_batch]
        keys = {key for key, _ in chosen}
        self.waiting = [w for w in self.waiting if w[0] not in keys]
        return self._generate(chosen, sampling)

    def _generate(self, chosen: list[tuple[int, Request]], sampling: Sampling) -> list[Finished]:
        prompts = [torch.from_numpy(r.prompt.token_ids.astype(np.int64)) for _, r in chosen]
        longest = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), longest), self.eos_ids[0] if self.eos_ids else 0)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padding on the left: generation goes on at the right
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        torch.manual_seed(chosen[0][1].seed)
        greedy = sampling.temperature == 0
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=sampling.max_tokens,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_p=None if greedy else sampling.top_p,
            top_k=0 if not greedy else None,
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.eos_ids[0] if self.eos_ids else 0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = out.sequences[:, longest:]  # [B, T]
        # Scores are the processed logits: what was sampled from.
        logprobs = torch.stack([s.float().log_softmax(-1) for s in out.scores], 1)  # [B, T, V]
        chosen_logprobs = logprobs.gather(-1, new[..., None])[..., 0]
        return [self._finish(key, new[row], chosen_logprobs[row]) for row, (key, _) in enumerate(chosen)]

    def _finish(self, key: int, tokens: Tensor, logprobs: Tensor) -> Finished:
        ends = torch.isin(tokens, torch.tensor(self.eos_ids, device=tokens.device)).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        return Finished(
            key,
            tokens[:length].cpu().numpy().astype(np.int32),
            logprobs[:length].cpu().numpy().astype(np.float32),
            "stop" if len(ends) else "length",
        )

    def load_weights(self, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
        """Copy every tensor into the model by name; raises RuntimeError for a name it does not have."""
        own = self.model.state_dict()
        for piece in pieces:
            for name, tensor in piece.items():
                if name not in own:
                    raise RuntimeError(f"weights version {version}: the model has no {name}")
                own[name].copy_(tensor)
