"""Sampling with vLLM, in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError

from gkd.data.model_info import ModelInfo
from gkd.inference.vllm_engine import Device, SetShape, Shape, sleep, wake
from gkd.types import Sample, SampleRequest
from gkd.weights import vllm_backend

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.weights.pieces import Piece


class VLLMEngine:
    """Continuous batching: requests join and leave at every step.

    ``llm`` is an engine of ``model``, started with the backend of :mod:`gkd.weights.vllm_plugin` and with
    log-probabilities of the distribution that is sampled from (``logprobs_mode="processed_logprobs"``).
    """

    def __init__(self, llm: LLM, model: ModelInfo, device: Device = "cpu") -> None:
        self.llm, self.engine, self.eos_ids, self.device = llm, llm.llm_engine, model.eos_ids, device
        self.forward_passes = self.version = 0
        self._requests: dict[str, SampleRequest] = {}
        if 0 < model.n_tokens < model.vocabulary:
            # A padded row has some probability, however small, and no teacher and no tokenizer knows its id.
            llm.apply_model(SetShape(Shape(rows=model.n_tokens)))

    def add(self, request: SampleRequest) -> None:
        """Take a request on. Raises ValueError when it is longer than the model takes."""
        sampling = request.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed,
            stop_token_ids=self.eos_ids,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
        )
        prompt = TokensPrompt(prompt_token_ids=request.prompt.token_ids.tolist())
        try:
            self.engine.add_request(str(request.key), prompt, params)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from None
        self._requests[str(request.key)] = request

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> list[Sample]:
        """One forward pass over everything running."""
        finished = []
        self.forward_passes += 1
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                finished.append(
                    Sample.single_turn(
                        self._requests.pop(output.request_id),
                        np.array(completion.token_ids, dtype=np.int32),
                        np.array(completion.logprobs.logprobs, dtype=np.float32),
                        self.version,
                        "stop" if completion.finish_reason == "stop" else "length",
                    )
                )
        return finished

    def sleep(self) -> None:
        """Give memory back while idle."""
        sleep(self.engine, self.device)

    def wake(self, weights_only: bool) -> None:
        """Take it again; ``weights_only``: as far as :meth:`load_weights` needs."""
        wake(self.engine, self.device, weights_only)

    def load_weights(self, pieces: Iterable[dict[str, Tensor]], version: int) -> None:
        """Replace the weights while idle and forget every cached prefix."""
        vllm_backend.load(self.llm, pieces, version)
        self.version = version

    def join(self, unique_id: str, offset: int, world: int) -> None:
        """Meet the actor in an NCCL group of ``world`` ranks, with this engine's from ``offset`` on."""
        vllm_backend.join(self.llm, unique_id, offset, world)

    def take(self, piece: Piece) -> None:
        """Load the next piece while idle."""
        vllm_backend.take(self.llm, piece)

    def finish(self, version: int) -> None:
        """Serve ``version`` and forget every cached prefix."""
        vllm_backend.finish(self.llm, version)
        self.version = version
