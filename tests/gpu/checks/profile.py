"""Where the time of W1's stages goes, each by itself in this process: kernels of a GPU, and the host's functions.

Figures are noted, tables are printed; nothing fails for being slow.
"""

from __future__ import annotations

import cProfile
import datetime
import functools
import io
import os
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.checks.context import Context
from tests.gpu.checks.w1 import BATCH, PROMPT, RESPONSE, SHAPES, SMALL, WORDS, make_models

TOP_K, ROWS, ROUNDS = 64, 22, 3


def update_and_score(context: Context) -> None:
    """A micro-batch through the student and back, in packs of two sizes; a batch through the teacher; the loss."""
    path, sizes = _models(context), _sizes(context)
    scored, (student, device) = _samples(sizes), _student(path, context)
    for budget in (2 * sizes.budget, sizes.budget):
        micro = _micro_batch(scored, budget).to(device)
        student.compilation.budget = budget
        run = _learner(student, micro)
        name = f"update_{budget}"
        context.note({f"{name}_tokens": len(micro.sequences), f"{name}_s": _seconds(run, device)})
        if budget > sizes.budget:
            _show_kernels(context, name, run, device)
            score = _scorer(path, sizes, context)
            context.note(score_s=_seconds(score, device), score_tokens=sizes.batch * (sizes.prompt + sizes.response))
            _show_kernels(context, "score", score, device)
            _note_losses(context)


def sampling(context: Context) -> None:
    """A batch of responses by vLLM, with either executor; then once more under a profiler of the host."""
    from gkd.cluster.workers.environment import environment
    from gkd.config import Rollout
    from gkd.data.model_info import ModelInfo
    from gkd.inference import vllm_sampler
    from gkd.inference.engine import EngineSpec

    path, sizes = _models(context), _sizes(context)
    device: Any = "cpu" if context.rehearsal else "cuda"
    os.environ.update(environment(device, []))
    settings = Rollout(max_num_seqs=sizes.batch, kv_cache_gb=1 if context.rehearsal else 4, gpu_memory_utilization=0.2)
    spec = EngineSpec(
        "rollout", str(path / "student"), ModelInfo(sizes.words, 4096, [], sizes.words), settings, device,
        "float32" if context.rehearsal else "bfloat16", max_length=sizes.prompt + sizes.response,
    )  # fmt: skip
    usual = vllm_sampler._arguments
    for executor in ("uni", "mp"):  # in one process, and with the GPU's part in another, as engines on GPUs are
        vllm_sampler._arguments = functools.partial(_with_executor, usual, executor)
        began = time.monotonic()
        engine = vllm_sampler.VLLMSampler(spec)
        context.note({f"{executor}_start_s": time.monotonic() - began})
        try:
            _note_sampling(
                context, executor, engine, [ids[: sizes.prompt] for ids in _token_ids(sizes)], sizes.response
            )
        finally:
            engine.close()


def _with_executor(usual: Callable[..., dict[str, Any]], executor: str, spec: Any) -> dict[str, Any]:
    return {**usual(spec), "distributed_executor_backend": executor}


def _note_sampling(context: Context, executor: str, engine: Any, prompts: list[Any], response: int) -> None:
    from gkd.types import Prompt, SampleRequest, Sampling

    def sample() -> None:
        for i, ids in enumerate(prompts):
            engine.add(i, SampleRequest(Prompt(i, ids, ""), 0, i, Sampling(response)))
        while engine.has_unfinished_requests():
            engine.step()

    times = []
    for _ in range(ROUNDS):
        began, passes = time.monotonic(), engine.forward_passes
        sample()
        times.append(time.monotonic() - began)
        ms = 1e3 * times[-1] / (engine.forward_passes - passes)
        context.note({f"{executor}_sample_s": times, f"{executor}_ms_a_pass": ms})
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(sample)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(2 * ROWS)
    print(executor, text.getvalue())


class _Sizes:
    """Of the workload; in a rehearsal of a small one."""

    def __init__(self, small: bool) -> None:
        self.words, self.prompt, self.response, self.batch = (
            (512, 16, 16, 8) if small else (WORDS, PROMPT, RESPONSE, BATCH)
        )
        self.budget = 64 if small else 8192
        self.top_k = 8 if small else TOP_K


def _sizes(context: Context) -> _Sizes:
    return _Sizes(context.rehearsal)


def _models(context: Context) -> Path:
    sizes, path = _sizes(context), context.scratch / "w1-models"
    if not (path / "prompts.jsonl").exists():
        make_models(path, SMALL if context.rehearsal else SHAPES, sizes.words, sizes.prompt, sizes.batch)
    return path


def _token_ids(sizes: _Sizes) -> Any:
    random = np.random.default_rng(0)
    return random.integers(2, sizes.words, (sizes.batch, sizes.prompt + sizes.response)).astype(np.int32)


def _samples(sizes: _Sizes) -> list[Any]:
    """Scored samples, as many as the larger pack takes, with targets at random."""
    from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target

    random, samples = np.random.default_rng(1), []
    n, k = sizes.response, sizes.top_k
    logprobs = np.log(np.full((n, k), 0.9 / k, np.float32))
    for i, ids in enumerate(_token_ids(sizes)[: 2 * sizes.budget // (sizes.prompt + n)]):
        request = SampleRequest(Prompt(i, ids[: sizes.prompt], ""), 0, i, Sampling(n))
        sample = Sample.single_turn(request, ids[sizes.prompt :], np.full(n, -12.0, np.float32), 0, "length")
        chosen = np.stack([random.choice(sizes.words, k, replace=False) for _ in range(8)]).astype(np.int32)
        tail = np.full(n, np.log(0.1), np.float32)
        target = Target(logprobs[:, 0].copy(), np.resize(chosen, (n, k)), logprobs, tail_logprobs=tail)
        samples.append(ScoredSample(sample, target))
    return samples


def _micro_batch(scored: list[Any], budget: int) -> Any:
    from gkd.actor.collate import collate

    some = scored[: max(1, budget // len(scored[0].sample.token_ids))]
    return collate(some, scored[0].teacher.ids.shape[1], [1e-5] * len(some), [1.0] * len(some))


def _student(path: Path, context: Context) -> tuple[Any, Any]:
    """The student as an actor that is alone has it: sharded, its layers compiled."""
    import torch
    import torch.distributed as dist

    from gkd.actor.compiling import compile_student
    from gkd.actor.copies import Copies
    from gkd.actor.loading import load_sharded
    from gkd.modeling import compiling

    if context.rehearsal:
        compiling.BACKEND = "aot_eager"
    device = torch.device("cpu" if context.rehearsal else "cuda")
    store = dist.HashStore()
    dist.init_process_group("gloo" if context.rehearsal else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    copies = Copies.join(device.type, 1, 1, datetime.timedelta(seconds=60))
    budget = 2 * _sizes(context).budget
    student = load_sharded(
        str(path / "student"), copies.mesh, device, torch.bfloat16,
        compiled=lambda lm: compile_student(lm, True, budget, device),
    )  # fmt: skip
    return student, device


def _learner(student: Any, micro: Any) -> Callable[[], None]:
    from gkd.config import Algorithm, Rollout
    from gkd.losses.objective import objective

    def learn() -> None:
        with student.use_compute_type():
            loss, _ = student(micro, objective(micro, Algorithm(), Rollout(), 1024, roomy=True))
            loss.backward()

    return learn


def _scorer(path: Path, sizes: _Sizes, context: Context) -> Callable[[], None]:
    from gkd.config import Teacher
    from gkd.data.model_info import ModelInfo
    from gkd.inference.engine import EngineSpec
    from gkd.inference.requests import ScoreRequest
    from gkd.inference.torch_scorer import TorchScorer

    settings = Teacher(engine="torch", max_num_seqs=sizes.batch)
    device: Any = "cpu" if context.rehearsal else "cuda"
    info = ModelInfo(sizes.words, 4096, [], sizes.words)
    spec = EngineSpec("teacher", str(path / "teacher"), info, settings, device, "bfloat16")
    engine, all_ids = TorchScorer(spec), _token_ids(sizes)

    def score() -> None:
        for key, ids in enumerate(all_ids):
            engine.add(key, ScoreRequest(ids, ((sizes.prompt, len(ids)),), sizes.top_k, 1.0, sizes.words))
        while engine.has_unfinished_requests():
            list(engine.step())

    return score


def _note_losses(context: Context) -> None:
    """The loss by itself, with the head, on a GPU with room and on one without."""
    import torch

    from tests.benchmarks.loss import Shape, measure

    sizes, device = _sizes(context), torch.device("cpu" if context.rehearsal else "cuda")
    for name, roomy in (("", False), ("_roomy", True)):
        shape = Shape(sizes.budget, sizes.words, SHAPES["student"][0], sizes.top_k, roomy=roomy)
        runs = [measure("compiled", "reverse_kl", shape, device) for _ in range(ROUNDS)]
        ms, peak = 1e3 * statistics.median(run["seconds"] for run in runs), max(run["bytes"] for run in runs)
        context.note({f"loss{name}_ms": ms, f"loss{name}_gib": peak / (1 << 30)})


def _seconds(run: Callable[[], None], device: Any) -> float:
    """The median after one run that compiles and warms."""
    import torch

    times = []
    for _ in range(1 + ROUNDS):
        began = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return statistics.median(times[1:])


def _show_kernels(context: Context, name: str, run: Callable[[], None], device: Any) -> None:
    """Print what took most of one run, on the device and on the host; note how long the device was busy."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    context.note({f"{name}_device_s": busy})
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        print(name, events.table(sort_by=order, row_limit=ROWS, max_name_column_width=70))
