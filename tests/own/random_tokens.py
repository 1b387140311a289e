"""A sampling engine of one's own: every token is drawn from the first few alike."""

import numpy as np
from pydantic import BaseModel, Field

from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.types import Sample, SampleRequest


class RandomTokens(InferenceEngine[SampleRequest, Sample]):
    can_sample, continuous = True, False  # all that wait are sampled in one step

    class Config(BaseModel):
        n_tokens: int = Field(4, ge=1, description="tokens to draw from")

    def __init__(self, spec: EngineSpec) -> None:
        self.n, self.end, self.waiting = spec.settings.class_settings().n_tokens, spec.model.eos_ids[0], []

    def add(self, key, request):
        self.waiting.append((key, request))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        self.forward_passes += 1
        done, self.waiting = self.waiting, []
        return [(key, self.sample(request)) for key, request in done]

    def sample(self, request):
        rng = np.random.default_rng(request.seed)
        tokens = np.append(rng.integers(0, self.n, rng.integers(1, request.sampling.max_tokens)), self.end)
        logprobs = np.full(len(tokens), -np.log(self.n), np.float32)
        return Sample.single_turn(request, tokens.astype(np.int32), logprobs, self.version, "stop")

    def load_weights(self, bucket, tensors):
        pass  # a transfer brought them; random tokens need none
