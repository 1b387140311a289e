"""How an engine of vLLM's starts, sleeps, wakes, and follows another one on a further node.

Engines that sample and engines that score both run vLLM inside their own process, so that the model object is at hand
and no server outlives a worker that dies. Nothing here imports vLLM or torch before an engine starts.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gkd.config.device import GIB, Device
from gkd.errors import RemoteError, RunFailed
from gkd.inference.engine import AnswerT, EngineSpec, InferenceEngine, ManagedMemory, ProcessResult, RequestT
from gkd.inference.vllm_environment import compile_apart, find_session_directory, meet_in_session

if TYPE_CHECKING:
    from vllm import LLM

LEAST_SHARE = 0.01
ENDS_WITHIN_S = 2.0
"""A process whose connections broke is found to have ended within this time."""


def engine_arguments(spec: EngineSpec, max_model_len: int | None = None, samples: bool = False) -> dict[str, Any]:
    """Return keyword arguments of ``vllm.LLM`` for the engine with ``spec``.

    Prompts go in and come out as token ids, so a tokenizer is loaded only to find the texts that end a response.
    ``max_model_len`` None is the model's own length, or as much of it as the key-value cache takes. Any number of
    log-probabilities may be requested: of an engine that ``samples``, whose requests carry seeds, those of the
    distribution that is sampled from (temperature, penalty and truncation applied), of others the model's.
    """
    settings, on_cpu, batched_tokens = spec.settings, spec.device == "cpu", spec.max_num_batched_tokens
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "skip_tokenizer_init": not spec.stops,
        # What prepares images needs a tokenizer; without images their tower is neither built nor counted.
        "language_model_only": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "dtype": spec.dtype,
        "max_model_len": -1 if max_model_len is None else max_model_len,
        "max_num_seqs": settings.slots,
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs" if samples else "raw_logprobs",
        # States are cached at chunks' ends alone, and prompts that are sampled from are not chunked.
        "enable_prefix_caching": not spec.model.stateful,
        "enforce_eager": settings.enforce_eager or on_cpu,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "seed": spec.seed,
        "disable_log_stats": True,
    }
    if spec.span is not None:
        arguments |= asdict(spec.span)
    if spec.sleeps and not on_cpu:
        arguments["enable_sleep_mode"] = True
    if batched_tokens is not None:
        arguments["max_num_batched_tokens"] = batched_tokens
    if samples and on_cpu:
        # Rewinding a request's generator after a part of its prompt is something only CUDA generators can do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(max_model_len or 0, batched_tokens or 4096)
    if on_cpu and spec.dtype == "float32":
        # Latent attention's kernels for AMX, which vLLM prefers, take no float32; other attention is not concerned.
        arguments["attention_backend"] = "CPU_MLA"
    if on_cpu or settings.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = settings.cpu_cache_gb * GIB
    elif spec.cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = spec.cache_bytes
        # vLLM still refuses to start where less of the GPU is free than this share, which then decides nothing.
        arguments["gpu_memory_utilization"] = LEAST_SHARE
    return arguments


def start_llm(arguments: dict[str, Any], device: Device) -> LLM:
    """Start ``vllm.LLM`` with arguments of :func:`engine_arguments`. vLLM raises what it likes when it cannot.

    RemoteError where that was in another process than this one, RuntimeError where one ended without an error.
    """
    from vllm import LLM

    # An engine makes several collections while it starts, each of which would search all that was imported: that is
    # more than half of its time. vLLM does the same once it has started.
    gc.freeze()
    compile_apart(device)
    meet_in_session()
    with _reasons_of_processes():
        return LLM(**arguments)


@contextmanager
def _reasons_of_processes() -> Iterator[None]:
    """Raise what :func:`start_llm` does where a process that vLLM starts meanwhile ends; vLLM leaves out why."""
    from gkd.weights.vllm_plugin import note_errors

    with note_errors(find_session_directory()) as first_error:
        try:
            yield
        except Exception as error:
            if (reason := first_error()) is not None:
                raise RemoteError(reason) from error
            if type(error) is not Exception:
                raise
            raise RuntimeError(  # vLLM's own states that a process did not start
                "a process of the engine ended without a word: killed, out of memory, or crashed in native code"
            ) from error


class Follower:
    """The processes of an engine on a further node: they do what the leader's engine requests.

    ``arguments`` are those of the leader but for the NodeSpan. Returns when all parts of the engine have met. Raises
    what :func:`start_llm` raises when they do not.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        compile_apart("cuda")
        meet_in_session()
        # Defaults, such as how many tokens a step has, depend on the context; vllm.LLM has this one.
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        with _reasons_of_processes():
            self._executor = MultiprocExecutor(config, monitor_workers=False)

    def serve(self) -> None:
        """Wait until one of the processes ends, and raise RunFailed then."""
        self._executor.start_worker_monitor(inline=True)
        raise RunFailed("a process of an engine that spans nodes has ended")


class VLLMEngine(InferenceEngine[RequestT, AnswerT]):
    """Base of the engines that run vLLM in this process: ``llm_engine`` of :func:`start_llm`, on ``device``."""

    needs_vllm = tensor_parallel = True
    managed_memory = ManagedMemory(
        graphs=0.5 * GIB,
        prompt_rows=1024,
        most_blocks=1 << 17,  # each costs some 70 ns whenever the cache is forgotten, and 150 bytes
        large_gpu=70 * GIB,  # vllm.engine.arg_utils, as what follows, for vllm.LLM
        step_tokens=(8192, 16384),
        max_num_seqs=(256, 1024),
    )
    llm_engine: Any
    device: Device

    def cache_bytes(self) -> int | None:
        """Return the size of the cache on each GPU, as vLLM measured what was left for it; None where it did not."""
        sizes = [size for size in self.llm_engine.collective_rpc(_read_measured_cache) if size is not None]
        return min(sizes, default=None)

    def call_processes(self, function: Callable[[], ProcessResult]) -> list[ProcessResult]:
        """Return what ``function`` returns in each process of the engine; nothing where it computes in this one."""
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if isinstance(self.llm_engine.engine_core.engine_core.model_executor, UniProcExecutor):
            return []
        return list(self.llm_engine.collective_rpc(_call, args=(function,)))

    def has_lost_process(self) -> bool:
        """Return whether one of the processes of an engine of several GPUs has ended, in the last moment maybe."""
        executor = self.llm_engine.engine_core.engine_core.model_executor
        if getattr(executor, "is_failed", False):
            return True
        sentinels = [handle.proc.sentinel for handle in getattr(executor, "workers", ())]
        return bool(multiprocessing.connection.wait(sentinels, ENDS_WITHIN_S)) if sentinels else False

    def sleep(self) -> None:
        """Move the weights to the host and forget the cache, while idle; on a CPU there is nowhere to move."""
        if self.device == "cuda":
            self.llm_engine.sleep(level=1)

    def wake(self, weights_only: bool = False) -> None:
        """Compute again as before :meth:`sleep`; ``weights_only``: without a cache, so that it can load but not run."""
        if self.device == "cuda":
            self.llm_engine.wake_up(["weights"] if weights_only else None)

    def close(self) -> None:
        """Free memory and end processes."""
        self.llm_engine.engine_core.shutdown()


def _read_measured_cache(worker: Any) -> int | None:
    size = getattr(worker, "available_kv_cache_memory_bytes", None)
    return None if size is None else int(size)


def _call(_: Any, function: Callable[[], ProcessResult]) -> ProcessResult:
    return function()
