"""Measures a divergence and its gradient at many positions: in one pass, plain and compiled, and by autograd with the
head recomputed.

    python tests/benchmarks/loss.py [--device cpu] [--positions 1024] [--vocabulary 128000] [--hidden 256]
        [--top-k 64] [--rounds 3] [--roomy]

Every run is a process of its own, the ways in turn. Memory is what the process grew by at its peak, on a GPU what torch
has allocated there. On a CPU all is float32; on a GPU hidden states and head are bfloat16, as the actor has them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gkd.config import Loss
from gkd.losses.chunked import Values, differentiate_in_chunks
from gkd.losses.outcomes import Kernels, use_kernels
from gkd.losses.position import position_losses
from gkd.losses.targets import PositionTargets

LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {"name": "forward_kl"},
    "reverse_kl": {"name": "reverse_kl"},
    "jsd": {"name": "jsd"},
    "sampled_reverse_kl": {"name": "sampled_reverse_kl"},
}


def main() -> None:
    """Run the benchmark and print a table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=64, help="0: the whole vocabulary")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--roomy", action="store_true", help="as an actor on a GPU with room")
    parser.add_argument("--losses", nargs="+", default=["reverse_kl", "jsd"], choices=list(LOSSES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| loss | way | seconds (median) | from, to | peak GB | gradient's norm |\n|---|---|---|---|---|---|")
    for loss in options.losses:
        results: dict[str, list[dict[str, float]]] = {
            "autograd": [], "one pass": [], "compiled": [], "products alone": [],
        }  # fmt: skip
        for _ in range(options.rounds):
            for way, runs in results.items():
                runs.append(_in_a_process(way, loss, options))
        for way, runs in results.items():
            seconds = [run["seconds"] for run in runs]
            norm = f"{runs[0]['norm']:.6g}" if "norm" in runs[0] else ""
            print(
                f"| {loss} | {way} | {statistics.median(seconds):.4g} | {min(seconds):.4g}, {max(seconds):.4g} "
                f"| {max(run['bytes'] for run in runs) / 1e9:.2f} | {norm} |"
            )


def _in_a_process(way: str, loss: str, options: argparse.Namespace) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run, args=(way, loss, options, sender))
    process.start()
    result: dict[str, float] = json.loads(receiver.recv())
    process.join()
    return result


def _run(way: str, loss: str, options: argparse.Namespace, sender: Any) -> None:
    shape = Shape(options.positions, options.vocabulary, options.hidden, options.top_k, options.chunk, options.roomy)
    sender.send(json.dumps(measure(way, loss, shape, torch.device(options.device))))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a measurement; ``top_k`` 0 is the whole vocabulary, ``chunk`` positions have logits at a time.

    ``roomy``: with as much memory as an actor on a GPU with room takes.
    """

    positions: int
    vocabulary: int
    hidden: int = 256
    top_k: int = 64
    chunk: int = 1024
    roomy: bool = False


def measure(way: str, loss: str, shape: Shape, device: torch.device) -> dict[str, float]:
    """Return ``seconds`` and peak ``bytes`` of a loss and its gradient, and the gradient's ``norm`` where there is one.

    ``way``: ``autograd``, ``one pass``, the same ``compiled``, or the ``products alone`` of the head with the hidden
    states.
    """
    hidden, head, targets = _make(shape, device)
    settings = Loss(**LOSSES[loss])
    one_pass = functools.partial(_one_pass, roomy=shape.roomy)
    compiled = functools.partial(_compiled, roomy=shape.roomy)
    ways: dict[str, Callable[..., None]] = {
        "autograd": _autograd,
        "one pass": one_pass,
        "compiled": compiled,
        "products alone": _products,
    }
    run = ways[way]
    if device.type == "cpu" and way != "compiled":
        run(*_small(hidden, head, targets), settings, 8)  # what is set up once
    else:
        run(hidden, head, targets, settings, shape.chunk)  # and the allocator's memory
        hidden.grad = head.weight.grad = None
    before, started = _begin(device), time.perf_counter()
    run(hidden, head, targets, settings, shape.chunk)
    figures = {"bytes": _peak(device) - before, "seconds": time.perf_counter() - started}
    if hidden.grad is not None and head.weight.grad is not None:
        norm = torch.sqrt(hidden.grad.double().square().sum() + head.weight.grad.float().norm().double() ** 2)
        figures["norm"] = float(norm)
    return figures


def _make(shape: Shape, device: torch.device) -> tuple[Tensor, torch.nn.Linear, PositionTargets]:
    """Return hidden states, a head, and the teacher's targets, all at random."""
    n, k = shape.positions, shape.top_k or shape.vocabulary
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    made: dict[str, Any] = {"generator": generator, "device": device}
    hidden = torch.randn(n, shape.hidden, **made).to(dtype).requires_grad_()
    head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, **made) / shape.hidden**0.5)
        ids = torch.stack([torch.randperm(shape.vocabulary, **made)[:k] for _ in range(n)])
        logprobs = torch.log_softmax(torch.randn(n, k, **made), -1)
        logprobs = logprobs if shape.top_k == 0 else logprobs + math.log(0.9)
    tail = torch.full((n,), 0.1, device=device).log() if shape.top_k else None
    tokens = torch.randint(shape.vocabulary, (n,), **made)
    return hidden, head, PositionTargets(tokens, logprobs[:, 0].contiguous(), ids, logprobs, tail)


def _begin(device: torch.device) -> int:
    """Have the peak count from here on; returns the bytes that there are."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: torch.device) -> int:
    """Return the largest number of bytes, once all is computed: on a GPU, or resident of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def _small(
    hidden: Tensor, head: torch.nn.Linear, targets: PositionTargets
) -> tuple[Tensor, torch.nn.Linear, PositionTargets]:
    return hidden[:8].detach().requires_grad_(), torch.nn.Linear(hidden.shape[1], head.out_features), targets.rows(0, 8)


def _one_pass(
    hidden: Tensor, head: torch.nn.Linear, targets: PositionTargets, loss: Loss, chunk: int, roomy: bool
) -> None:
    def of(logits: Tensor, start: int) -> tuple[Tensor, Values]:
        result = position_losses(logits, targets.rows(start, start + len(logits)), loss)
        return result.loss.sum(), {"loss": result.loss, **result.diagnostics()}

    values, gradients = differentiate_in_chunks(hidden, head, of, chunk, roomy)
    gradients.attach_to(values["loss"].sum()).backward()  # type: ignore[no-untyped-call]


def _compiled(
    hidden: Tensor, head: torch.nn.Linear, targets: PositionTargets, loss: Loss, chunk: int, roomy: bool
) -> None:
    with use_kernels(_kernels()):
        _one_pass(hidden, head, targets, loss, chunk, roomy)


@functools.cache
def _kernels() -> Kernels:
    return Kernels.compile()


def _autograd(hidden: Tensor, head: torch.nn.Linear, targets: PositionTargets, loss: Loss, chunk: int) -> None:
    """Differentiate log-probabilities from log_softmax, with the head run again in the backward pass."""
    divergence: Callable[..., Tensor] = loss.build()

    def of(rows: Tensor, start: int) -> Tensor:
        log_q = torch.log_softmax(head(rows).float(), -1)
        own = targets.rows(start, start + len(rows))
        if loss.compares_tokens_alone:
            return divergence(own.teacher_token_logprobs, log_q.gather(-1, own.token_ids[:, None])[:, 0])
        if own.tail_logprobs is None:
            value = divergence(torch.zeros_like(log_q).scatter(-1, own.ids, own.logprobs), log_q)
        else:
            rest = log_q.scatter(-1, own.ids, torch.finfo(log_q.dtype).min / 2).logsumexp(-1)
            log_q_k = torch.cat([log_q.gather(-1, own.ids), rest[:, None]], -1)
            value = divergence(torch.cat([own.logprobs, own.tail_logprobs[:, None]], -1), log_q_k)
        with torch.no_grad():
            torch.special.entr(log_q.exp()).sum(-1)  # the metric that goes with it
        return value

    starts = range(0, len(hidden), chunk)
    parts = [
        checkpoint(of, rows, i, use_reentrant=False) for i, rows in zip(starts, torch.split(hidden, chunk), strict=True)
    ]
    torch.cat(parts).sum().backward()  # type: ignore[no-untyped-call]


def _products(hidden: Tensor, head: torch.nn.Linear, targets: PositionTargets, loss: Loss, chunk: int) -> None:
    del targets, loss
    with torch.no_grad():
        for rows in torch.split(hidden, chunk):
            logits = head(rows)
            logits.T @ rows
            logits @ head.weight


if __name__ == "__main__":
    main()
