"""A rating engine of one's own: a language model rates a text by the mean log-probability of its tokens."""

from gkd.data.tokenizer import check_causal_lm
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.requests import RateRequest


class Likelihood(InferenceEngine[RateRequest, float]):
    can_rate = True

    def __init__(self, spec: EngineSpec) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(spec.model_path).to(spec.device)
        self.limits, self.waiting = spec.limits(spec.settings.max_model_len, rates=True), []

    @classmethod
    def check_model(cls, path: str, setting: str) -> str:
        return check_causal_lm(path, setting)

    def add(self, key, request):
        self.waiting.append((key, request))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        done, self.waiting = self.waiting, []
        return [(key, self.rate(request)) for key, request in done]

    def rate(self, request):
        import torch

        ids = torch.tensor(request.token_ids[None], dtype=torch.long, device=self.model.device)
        with torch.inference_mode():
            return -self.model(ids, labels=ids).loss.item()
