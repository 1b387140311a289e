"""Sampling with vLLM, whose scheduler is in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gkd.config.transfer import passes_worker
from gkd.inference.engine import EngineSpec
from gkd.inference.vllm_environment import share_gpu_of_worker
from gkd.inference.vllm_lifecycle import Follower, VLLMEngine, engine_arguments, start_llm
from gkd.inference.vllm_logits import Shape
from gkd.types import Sample, SampleRequest, Sampling, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.weights.transfer import Bucket
    from gkd.weights.vllm_adapter import AdapterLoader
    from gkd.weights.vllm_backend import CachePolicy


class VLLMSampler(VLLMEngine[SampleRequest, Sample]):
    """Continuous batching: requests join and leave at every step.

    Log-probabilities are those of the distribution that is sampled from.
    """

    can_sample = gpu_transfers = in_flight = True
    temperatures = 0.01, 2.0  # SamplingParams samples lower ones at the lowest, and refuses more
    adapter_ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks

    def __init__(self, spec: EngineSpec) -> None:
        self.llm = start_llm(_arguments(spec), spec.device)
        self.llm_engine, self.device, self._eos_ids = self.llm.llm_engine, spec.device, spec.model.eos_ids
        self.weights, self._rank = spec.weights, spec.rank
        self._requests: dict[str, SampleRequest] = {}
        self._paused = False
        self._finished: list[tuple[int, Sample]] = []  # while it was being paused
        self._salted = spec.keeps_cache
        self._adapter: AdapterLoader | None = None
        if spec.lora is not None:
            from gkd.weights.vllm_adapter import AdapterLoader

            self._adapter = AdapterLoader(self.llm, spec.lora)
        if spec.weights is not None and (way := spec.weights.transfer_class).gpu_to_gpu and not way.shards:
            from gkd.weights import vllm_backend

            vllm_backend.prepare(self.llm, spec.weights)
        if 0 < spec.model.n_tokens < spec.model.vocabulary:
            # A padded row has some probability, however small, and no teacher and no tokenizer has its id.
            self.llm.apply_model(Shape(rows=spec.model.n_tokens).put_on)

    @classmethod
    def follow(cls, spec: EngineSpec) -> Follower:
        """Return vLLM's processes on a further node of the engine with ``spec``."""
        return Follower(_arguments(spec))

    def add(self, key: int, request: SampleRequest) -> None:
        """Queue a request. Raises ValueError when it is longer than the model takes."""
        from vllm.exceptions import VLLMValidationError

        try:
            self._submit(str(key), request, self.version)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from None
        self._requests[str(key)] = request

    def _submit(self, name: str, request: SampleRequest, version: int) -> None:
        """Queue a request that begins under the weights of ``version``."""
        from vllm.inputs import TokensPrompt  # of the package itself every import looks the name up anew

        params = _make_params(request.sampling, tuple(self._eos_ids)).clone()  # what they check is checked once
        params.seed = request.seed
        prompt = TokensPrompt(prompt_token_ids=request.prompt.token_ids.tolist())
        if self._salted:  # what weights of another version have cached is not this one's prefix
            prompt["cache_salt"] = str(version)
        lora = None if self._adapter is None else self._adapter.request
        self.llm_engine.add_request(name, prompt, params, lora_request=lora)

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished."""
        return bool(self._finished) or bool(self.llm_engine.has_unfinished_requests())

    def step(self) -> list[tuple[int, Sample]]:
        """Do one forward pass over everything running."""
        finished, self._finished = self._finished, []
        self.forward_passes += 1
        for output in self.llm_engine.step():
            if output.finished:
                completion = output.outputs[0]
                request = self._requests.pop(output.request_id)
                sample = Sample.single_turn(
                    request,
                    np.array(completion.token_ids, dtype=np.int32),
                    np.array(completion.logprobs.logprobs, dtype=np.float32),
                    self.version,
                    "stop" if completion.finish_reason == "stop" else "length",
                )
                spans = _spans(completion.weight_versions, len(request.prompt.token_ids))
                sample = replace(sample, versions=spans) if len(spans) > 1 else sample
                finished.append((int(output.request_id), sample))
        return finished

    def pause(self) -> None:
        """Compute nothing more until the last bucket of new weights is loaded; requests stay where they are."""
        if self._paused:
            return
        self.llm_engine.sleep(level=0, mode="keep")
        self._paused = True
        core = self.llm_engine.engine_core.engine_core
        while getattr(core, "batch_queue", None):  # on a GPU a pass may be under way
            done = self.step()  # with what was finished before
            self._finished = done

    def _resume(self, bucket: Bucket) -> None:
        if bucket.last and self._paused:
            if self._salted:
                self._requeue(bucket.version)
            self.llm_engine.wake_up(["scheduling"])
            self._paused = False

    def _requeue(self, version: int) -> None:
        """Queue requests anew that have not begun: they would read what older weights have cached of their prompts."""
        names = self.llm_engine.output_processor.request_states
        waiting = self.llm_engine.engine_core.engine_core.scheduler.waiting
        # Those that were preempted have begun, and go on with what they have.
        not_begun = [
            names[request.request_id].external_req_id for request in waiting if request.status.name == "WAITING"
        ]
        self.llm_engine.abort_request(not_begun)
        for name in not_begun:
            self._submit(name, self._requests[name], version)

    def load_weights(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        """Load the next bucket while idle or paused; with the last one forget every cached prefix."""
        from gkd.weights import vllm_backend

        if self._adapter is not None:
            self._adapter.load(bucket, tensors, running=self._cache_policy)
        else:
            vllm_backend.load(self.llm, bucket, tensors, running=self._cache_policy)
        self._resume(bucket)

    def receive_weights(self, bucket: Bucket) -> None:
        """Load the next bucket, which each of the engine's processes receives, as :meth:`load_weights`."""
        from gkd.weights import vllm_backend

        vllm_backend.load(self.llm, bucket, running=self._cache_policy, rank=self._rank)
        self._resume(bucket)

    @property
    def _cache_policy(self) -> CachePolicy:
        if not self._paused:
            return "none"
        return "keep" if self._salted else "recompute"

    def join(self, address: str, offset: int, world: int) -> None:
        """Join the actor's group of ``world`` ranks, with this engine's processes from ``offset`` on."""
        from gkd.weights import vllm_backend

        assert self.weights is not None, "an engine whose weights change has their settings"
        vllm_backend.join(self.llm, self.weights, address, offset, world)


@lru_cache(maxsize=8)
def _make_params(sampling: Sampling, eos_ids: tuple[int, ...]) -> Any:
    """Return vLLM's parameters of requests, without the seed that each has for itself."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        stop=list(sampling.stop),
        seed=0,
        stop_token_ids=list(eos_ids),
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # they end responses as other texts do
        skip_clone=True,  # a request has a copy of its own
        output_kind=RequestOutputKind.FINAL_ONLY,  # one of every request at every step is twice the host's work
    )


def _spans(versions: Sequence[Any] | None, n_prompt: int) -> tuple[VersionSpan, ...]:
    """Return vLLM's spans of a response as positions of the trajectory; weights that were never changed are 0."""
    return tuple(
        VersionSpan(n_prompt + span.start, n_prompt + span.end, int(span.version) if span.version.isdigit() else 0)
        for span in versions or ()
        if span.end > span.start
    )


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return arguments of vLLM's engine; makes the weight backends known to this process."""
    from gkd.weights import vllm_plugin

    arguments = engine_arguments(spec, spec.max_length, samples=True)
    weights = spec.weights
    if spec.device == "cuda" and not (weights and passes_worker(weights.transfer_class, weights.adapter_only)):
        # What vLLM's scheduler and its model runner do on the host between two passes is beside each other then.
        # Whole weights that come through the host would have to go on to the other process.
        arguments["distributed_executor_backend"] = "mp"
    if spec.lora is not None:
        from gkd.weights import vllm_adapter

        return arguments | vllm_adapter.arguments(spec.lora, VLLMSampler.adapter_ranks)
    if spec.weights is None:
        return arguments
    vllm_plugin.register()
    if arguments["distributed_executor_backend"] != "uni":
        vllm_plugin.require_installed()
    if spec.weights.transfer_class.ray_executor:
        os.environ.update(share_gpu_of_worker())
        arguments["distributed_executor_backend"] = "ray"
    return {**arguments, "weight_transfer_config": {"backend": spec.weights.transfer_class.backend}}
