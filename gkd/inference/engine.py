"""What an inference engine is, whichever library runs the model, and whether it samples, scores or rates.

The settings ``rollout.engine``, ``teacher.engine``, ``reference.engine`` and ``reward_model.engine`` name a class that
derives from :class:`InferenceEngine`. Its class attributes state what it can do, so configuration and plan look at
the class and nothing else depends on a name. The modules of such classes import torch, vLLM and transformers within
functions alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from gkd.config.device import Device, Dtype, EngineLoad, NodeSpan
from gkd.config.groups import scorer_group
from gkd.data.tokenizer import check_model
from gkd.errors import ConfigError
from gkd.inference.requests import Limits, RequestRejected

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.config import Config, Lora, Weights
    from gkd.data.model_info import ModelInfo
    from gkd.weights.transfer import Bucket

ENTRY_BYTES = 8 + 4
"""Of a top K on a GPU: an id and a log-probability."""
FLOAT_BYTES = 4
NO_PROBABILITY = "the student gives a token no probability: its logits are not finite"

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
ProcessResult = TypeVar("ProcessResult")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is built from.

    ``name``: whose engine it is: ``rollout`` of one that samples, or which of the models that score, ``teacher``,
    ``teacher:NAME`` (one of several), ``reference``, ``reward_model``.
    ``model`` describes the model in ``model_path``. ``settings`` is the section of the engine's pool, and
    ``settings.class_settings()`` the settings of the engine's class. ``max_length`` is the longest sequence in tokens,
    None for the model's own. ``rank`` is the engine's place in its group. ``sleeps``: the engine frees its memory at
    times. ``weights`` is the section of that name, None for an engine whose weights never change. ``span``: which part
    of an engine over several nodes this is. ``max_num_batched_tokens`` bounds the tokens of one step, None for the
    engine's own rule. ``keeps_cache``: requests that weights are changed under go on with what older ones cached.
    ``lora``: pushes bring an adapter of this kind alone, None for whole weights. ``cache_bytes``: the size of the
    cache on each GPU, where ``settings`` give none; None: what a share of the GPU leaves. ``stops``: the texts that may
    end a response, those that single sets of questions have included.
    """

    name: str
    model_path: str
    model: ModelInfo
    settings: Any
    device: Device
    dtype: Dtype
    max_length: int | None = None
    rank: int = 0
    seed: int = 0
    sleeps: bool = False
    weights: Weights | None = None
    span: NodeSpan | None = None
    max_num_batched_tokens: int | None = None
    keeps_cache: bool = False
    lora: Lora | None = None
    cache_bytes: int | None = None
    stops: tuple[str, ...] = ()

    @staticmethod
    def for_rollout(
        config: Config, model_path: str, model: ModelInfo, max_length: int, rank: int, device: Device
    ) -> EngineSpec:
        """Return the spec of the rollout group's engine ``rank``, which samples from the student."""
        return EngineSpec(
            "rollout",
            model_path,
            model,
            config.rollout,
            device,
            config.model.dtype_on(device),
            max_length,
            rank,
            seed=config.trainer.seed + rank,
            sleeps=config.cluster.offload is True and "rollout" in config.groups_on_actor_gpus(),
            weights=config.weights,
            keeps_cache=config.schedule.in_flight and not config.schedule.recompute_cache,
            lora=config.actor.lora if config.weights.adapter_only else None,
            stops=config.stops,
        )

    @property
    def section(self) -> str:
        """The section of the settings, which is that of the group."""
        return scorer_group(self.name)

    def require_positions(self) -> None:
        """Raise ConfigError where sequences that are to be scored are longer than the model takes."""
        longest: int | None = self.settings.max_model_len
        if longest is not None and self.model.positions is not None and longest > self.model.positions:
            raise ConfigError(
                f"{self.section}.max_model_len={longest}: the {self.name} has {self.model.positions} positions"
            )

    def limits(self, max_length: int, *, rates: bool = False) -> Limits:
        """Return those of an engine that scores, or ``rates``, sequences of up to ``max_length`` tokens."""
        rows, top_k = self.model.vocabulary, 0 if rates else self.settings.max_top_k
        return Limits(self.name, self.model_path, rows, min(top_k, rows), max_length, self.settings.max_num_seqs, rates)


@dataclass(frozen=True, slots=True)
class ManagedMemory:
    """The part of an engine's share of a GPU (``gpu_memory_utilization``) that it takes by itself, as plans count it.

    ``graphs``: bytes of captured graphs. ``prompt_rows``: prompt rows whose log-probabilities are computed at a time.
    ``most_blocks``: blocks of a cache beyond which forgetting it takes the host long. ``step_tokens``: tokens of a step
    by default, and ``max_num_seqs``: sequences at a time, both of a GPU below and from ``large_gpu`` bytes on.
    """

    graphs: float
    prompt_rows: int
    most_blocks: int
    large_gpu: float
    step_tokens: tuple[int, int]
    max_num_seqs: tuple[int, int]

    def by_size(self, defaults: tuple[int, int], memory: float) -> int:
        """Return which of two defaults holds on a GPU with so many bytes of memory."""
        return defaults[memory >= self.large_gpu]


class InferenceEngine(ABC, Generic[RequestT, AnswerT]):
    """Answers requests. One thread builds it and calls all methods.

    An engine that samples takes :class:`gkd.types.SampleRequest` and answers with :class:`gkd.types.Sample`. An engine
    that scores takes ``ScoreRequest`` and ``GenerateRequest`` of :mod:`gkd.inference.requests`; one that rates takes
    ``RateRequest``; both state their ``limits``, and are given only what ``limits.check`` passes. A nested pydantic
    model ``Config`` holds settings of the class' own.
    """

    can_sample: ClassVar[bool] = False
    can_score: ClassVar[bool] = False
    can_rate: ClassVar[bool] = False
    continuous: ClassVar[bool] = True
    """Of an engine that samples: whether a request begins when another one is done, instead of all together."""
    needs_vllm: ClassVar[bool] = False
    """Whether vLLM has to support the model, and be built for the device."""
    tensor_parallel: ClassVar[bool] = False
    """Whether an engine may span GPUs (``tensor_parallel_size``) and nodes."""
    managed_memory: ClassVar[ManagedMemory | None] = None
    """Of an engine that takes ``gpu_memory_utilization`` of a GPU, and captures graphs and keeps a cache in it."""
    quantizes: ClassVar[bool] = False
    """Whether the engine takes ``quantization``, the name of a method of vLLM's."""
    temperatures: ClassVar[tuple[float, float] | None] = None
    """The lowest and the highest temperature that the engine samples at; None for any."""
    adapter_ranks: ClassVar[tuple[int, ...]] = ()
    """Sizes that LoRA adapters are given room for, rising; empty where adapters have to be merged into the weights."""
    gpu_transfers: ClassVar[bool] = False
    """Whether :meth:`receive_weights` takes weights from other processes' GPUs. All engines take them from the host."""

    in_flight: ClassVar[bool] = False
    """Whether :meth:`pause` is there, so that weights can change while requests are unfinished."""

    pass_tokens: ClassVar[Mapping[Device, int]] = {"cpu": 4096, "cuda": 16384}
    """Of an engine that scores: tokens of one forward pass, unless one sequence has more."""
    logit_bytes: ClassVar[Mapping[Device, int]] = {"cpu": 64 << 20, "cuda": 512 << 20}
    """Of an engine that scores: float32 logits that it has at a time, and up to three temporaries as large."""
    scores_every_token: ClassVar[frozenset[Device]] = frozenset()
    """Of an engine that scores: devices on which it has the head at every token, not at the wanted ones alone."""
    compiled_speed: ClassVar[float] = 1.0
    """Of an engine that scores, on a GPU and without ``enforce_eager``: the rate at which a pass computes, in those of
    ``plan.efficiency``."""
    result_bytes: ClassVar[float] = math.inf
    """Of an engine that scores: results of unfinished requests that it holds at most."""

    limits: Limits
    forward_passes: int = 0
    """Passes through the model so far; grows while the engine works. Other threads read it."""
    version: int = 0
    """Version of the weights that the engine samples from; the rollout worker sets it after each push."""

    @abstractmethod
    def __init__(self, spec: EngineSpec) -> None:
        """Load the model. Raises ConfigError or RunFailed where that cannot be done."""

    @classmethod
    def check_model(cls, path: str, setting: str) -> str:
        """Return the directory of the model at ``path``, with which the engine is to rate.

        Raises ConfigError, naming ``setting``, for one that it does not take. By default any whose weights are
        safetensors and which has a tokenizer; gkd.data.tokenizer has checks of one kind, such as ``check_causal_lm``.
        """
        return check_model(path, setting)

    @classmethod
    def batched_tokens(cls, vocabulary: int, settings: Any, device: Device) -> int | None:
        """Return the tokens of a step of an engine that scores; None: as many as the library chooses."""
        return cls.pass_tokens[device]

    @classmethod
    def memory(cls, load: EngineLoad) -> dict[str, float]:
        """Return the bytes by item that an engine takes at its worst moment, of one without ``managed_memory``.

        By default those of the weights and of one forward pass, of ``pass_tokens`` unless one sequence has more.
        """
        n_tokens = max(load.longest, min(cls.pass_tokens[load.device], load.n_sequences * load.longest))
        passed = n_tokens * load.pass_bytes
        return {"weights": float(load.dtype_bytes * load.n_parameters), "activations": float(passed)}

    @classmethod
    def quantized_bits(cls, method: str) -> int | None:
        """Return the bits of a weight that ``quantization`` leaves, by its name, such as fp8; None: it has none."""
        return next((bits for bits in (4, 8) if str(bits) in method), None)

    @classmethod
    def top_k_bytes(cls, tokens: int, k: int) -> int:
        """Return what the top ``k`` of a step of so many tokens take on a GPU."""
        return tokens * (k + 1) * ENTRY_BYTES

    @classmethod
    def follow(cls, spec: EngineSpec) -> Any:
        """Return the part on a further node of the engine with ``spec``; its ``serve()`` waits for its end."""
        raise NotImplementedError(f"{cls.__name__} runs on one node")

    @abstractmethod
    def add(self, key: int, request: RequestT) -> None:
        """Queue a request. Raises ValueError when the engine cannot serve it."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, AnswerT | RequestRejected]]:
        """Work for a moment; return keys and answers of requests that it finished, or could not take on after all."""

    def has_lost_process(self) -> bool:
        """Return whether a process of the engine's has died, which is then why it failed."""
        return False

    def call_processes(self, function: Callable[[], ProcessResult]) -> list[ProcessResult]:
        """Return what ``function`` returns in each process of the engine's other than this one, which has none."""
        return []

    def cache_bytes(self) -> int | None:
        """Return the size that the engine measured for its cache, on each GPU; None where it measures nothing."""
        return None

    def sleep(self) -> None:
        """Free the GPU's memory while idle."""

    def wake(self, weights_only: bool = False) -> None:
        """Allocate the memory again; ``weights_only``: as far as new weights need."""

    def pause(self) -> None:
        """Compute nothing more, with requests unfinished, until the last bucket of new weights is loaded."""
        raise NotImplementedError(f"{type(self).__name__} takes weights only while it is idle")

    def load_weights(self, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        """Load the next bucket of new weights while idle or paused; with the last one the engine serves them.

        ``tensors`` are those of ``bucket``, on the host, under the names of the model's files.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights")

    def receive_weights(self, bucket: Bucket) -> None:
        """Do as :meth:`load_weights`, with tensors that each of the engine's processes receives on its own GPU."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights from GPUs")

    def join(self, address: str, offset: int, world: int) -> None:
        """Join the actor's group of ``world`` ranks, with this engine's processes from ``offset`` on."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights from GPUs")

    def close(self) -> None:
        """Free memory and end processes."""


class ModuleEngine(InferenceEngine[RequestT, AnswerT]):
    """An engine whose memory is that of a torch module, ``model`` on ``device``, which sleeps on the host."""

    model: Any
    device: Device

    def sleep(self) -> None:
        """Move the model to the host."""
        import torch

        self.model.to("cpu")
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def wake(self, weights_only: bool = False) -> None:
        """Move it back. There is nothing but weights."""
        self.model.to(self.device)
