"""How this project starts vLLM: the environment a process needs before importing it, the arguments of an engine, and
what is done to its logits.

Rollout and teacher both run vLLM inside their own process, so that the model object is at hand and no server outlives a
worker that dies. Nothing here imports vLLM or torch before it is asked for an engine.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gkd.config import Engine
from gkd.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM

Device = Literal["cpu", "cuda"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Span:
    """Where a part of an engine that spans nodes stands; the fields are arguments of vLLM's engines."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


def environment(device: Device, cpu_threads: int | None = None) -> dict[str, str]:
    """Environment variables to set before torch or vLLM is imported in a process whose engine runs on ``device``.

    ``cpu_threads`` an engine on a CPU computes with; None: every core this process may use. vLLM logs errors only,
    unless ``VLLM_LOGGING_LEVEL`` already says otherwise.
    """
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process; 38 s to start become 5
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Its warnings tell of things chosen here on purpose, with a traceback for the chat template it cannot warm up.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # Scoring needs room for one token more than the longest sequence (see teacher.scoring); it is never computed.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while they wait take the cores from whoever has work: with one other program on two cores a
        # step takes ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }
    if device == "cuda":
        # Never used here (requests carry seeds), but imported all the same where it is not switched off.
        return {**common, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {
        **common,
        # Otherwise every engine of a machine pins itself to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Ray sets this to the CPUs an actor reserves, which is a share for scheduling, not a width to compute with.
        "OMP_NUM_THREADS": str(cpu_threads or len(os.sched_getaffinity(0))),
        # All that would be compiled in eager mode is the count behind a token's rank, in 5 to 18 s.
        "TORCHDYNAMO_DISABLE": "1",
    }


def engine_arguments(
    model_path: str,
    device: Device,
    settings: Engine,
    *,
    dtype: Literal["float32", "bfloat16"],
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    prefix_caching: bool = True,
    seeded: bool = False,
    seed: int = 0,
    sleeps: bool = False,
    span: Span | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for the engine of a pool.

    Prompts go in and come out as token ids, so no tokenizer is loaded. ``max_model_len`` None is the model's own
    length, or as much of it as the key-value cache takes. ``logprobs_mode`` "processed_logprobs" are those of the
    distribution that was sampled from (temperature and top_p applied), "raw_logprobs" the model's. Any number of
    log-probabilities may be asked for. ``seeded``: requests carry seeds. ``sleeps``: it is to give its memory back at
    times, which an engine on a CPU has no need of. ``span``: which part this is of an engine on several nodes.
    """
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "dtype": dtype,
        "max_model_len": -1 if max_model_len is None else max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_logprobs": -1,
        "logprobs_mode": logprobs_mode,
        "enable_prefix_caching": prefix_caching,
        "enforce_eager": settings.enforce_eager or device == "cpu",
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "seed": seed,
        "disable_log_stats": True,
    }
    if span is not None:
        arguments |= asdict(span)
    if sleeps and device == "cuda":
        arguments["enable_sleep_mode"] = True
    if max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = max_num_batched_tokens
    if seeded and device == "cpu":
        # Rewinding a request's generator after a part of its prompt is something only CUDA generators can do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(max_model_len or 0, max_num_batched_tokens or 4096)
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_gb * GIB
    return arguments


def start_llm(arguments: dict[str, Any], device: Device) -> LLM:
    """``vllm.LLM`` with these arguments, see :func:`engine_arguments`. vLLM raises what it likes when it cannot."""
    from vllm import LLM

    compile_apart(device)
    return LLM(**arguments)


def compile_apart(device: Device) -> None:
    """Have vLLM keep what it compiles for GPUs in a directory by the GPUs that this process sees.

    Engines of one model that start at the same time on different GPUs would write the same files. Before the process'
    engine starts.
    """
    if device == "cuda":
        from vllm import envs

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
        # Not from vLLM alone: a process that has had an engine is told what the variable was then.
        root, own = Path(os.environ.get("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)), f"gpu-{gpus}"
        os.environ["VLLM_CACHE_ROOT"] = str(root if root.name == own else root / own)


class Follower:
    """The processes of an engine on a further node: they do what the leader's engine tells them.

    ``arguments`` are those of the leader but for the Span. Returns when all parts of the engine have met; vLLM raises
    what it likes when they do not.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        compile_apart("cuda")
        # Defaults, such as how many tokens a step has, depend on the context; vllm.LLM has this one.
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def serve(self) -> None:
        """Wait until one of the processes ends, and raise RunFailed then."""
        self._executor.start_worker_monitor(inline=True)
        raise RunFailed("a process of an engine that spans nodes has ended")


def sleep(llm_engine: Any, device: Device) -> None:
    """Have an idle engine move its weights to the host and forget its cache; on a CPU there is nowhere to move."""
    if device == "cuda":
        llm_engine.sleep(level=1)


def wake(llm_engine: Any, device: Device, weights_only: bool = False) -> None:
    """Have an engine that sleeps be as before; ``weights_only``: without a cache, so that it can load but not run."""
    if device == "cuda":
        llm_engine.wake_up(["weights"] if weights_only else None)


def installed_device() -> Device:
    """Where engines run on this machine: "cpu" when the CPU build of vLLM is installed, "cuda" otherwise."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def require_device(device: Device, who: str) -> None:
    """Raise ConfigError unless the installed vLLM runs on ``device``, where ``who`` is to run an engine."""
    if installed_device() == device:
        return
    if device == "cpu":
        raise ConfigError(
            f"{who} has a simulated GPU, where vLLM computes on the CPU, but its CUDA build is installed: "
            "GKD_DEVICE=cpu ./launch/quickstart.sh installs the other into a fresh .venv"
        )
    raise ConfigError(
        f"{who} has a GPU, but vLLM's CPU build is installed: pip install 'gkd[cuda]' into a fresh environment, "
        "or simulate GPUs with placement=cpu"
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """What is done to the logits of every request in an engine: ids from ``rows`` on are impossible, the rest is
    divided by ``temperature``.
    """

    temperature: float = 1.0
    rows: int | None = None


class _Shaped:
    """Stands in for a model's ``compute_logits``."""

    def __init__(self, compute_logits: Any) -> None:
        self.compute_logits, self.shape = compute_logits, Shape()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = self.compute_logits(*args, **kwargs)
        if logits is None:  # not the rank that has them
            return None
        if self.shape.rows is not None and self.shape.rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.shape.rows :] = float("-inf")
        # In float32, as vLLM's own log-softmax: bfloat16 logits would be rounded a second time.
        return logits if self.shape.temperature == 1.0 else logits.float() / self.shape.temperature


class SetShape:
    """For ``apply_model``: gives the model a shape. A class, so that it can be sent to tensor-parallel workers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __call__(self, model: Any) -> None:
        if not isinstance(model.compute_logits, _Shaped):
            model.compute_logits = _Shaped(model.compute_logits)
        model.compute_logits.shape = self.shape
