"""A scoring engine of one's own: one sequence after another, with the logits of all of its tokens."""

import numpy as np

from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.requests import GenerateRequest, ScoreRequest
from gkd.types import Int32, Target


class PlainScorer(InferenceEngine[ScoreRequest | GenerateRequest, Target | Int32]):
    can_score, scores_every_token = True, frozenset({"cpu", "cuda"})

    def __init__(self, spec: EngineSpec) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(spec.model_path)
        self.limits, self.waiting = spec.limits(spec.settings.max_model_len), []

    def add(self, key, request):
        self.waiting.append((key, request))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        done, self.waiting = self.waiting, []
        return [(key, self.answer(request)) for key, request in done]

    def answer(self, request):
        import torch

        if isinstance(request, GenerateRequest):
            ids = torch.tensor(request.prompt_ids[None]).long()
            return self.model.generate(ids, max_new_tokens=request.max_tokens)[0, ids.shape[1] :].int().numpy()
        at, k = np.concatenate([np.arange(*span) for span in request.spans]), self.limits.width(request)
        logits = self.model(torch.tensor(request.token_ids[None]).long()).logits.detach()[0, at - 1]
        ranked = (logits[:, : self.limits.rows(request)] / request.temperature).log_softmax(-1).sort(descending=True)
        values, ids = ranked.values.numpy(), ranked.indices.int().numpy()  # [N, V]
        tails = ranked.values[:, k:].logsumexp(-1).numpy() if 0 < k < values.shape[1] else None
        return Target(values[ids == request.token_ids[at, None]], ids[:, :k], values[:, :k], request.temperature, tails)
