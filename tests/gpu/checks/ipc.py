"""Twenty pushes of weights by CUDA's inter-process memory, with checksums, against a copy within the GPU.

In a rehearsal by files (:mod:`tests.gpu.shared_memory`), with small tensors: all but what CUDA does.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from gkd.config import Weights
from gkd.weights.ipc import IpcReceiver
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import Bucket
from tests.gpu.checks.context import Context, require, use_gpu

TENSORS, ROWS, COLUMNS, BUCKET_MB = 25, 8192, 4096, 256  # 64 MiB each in bfloat16, 1.6 GiB in all
SMALL_ROWS, SMALL_COLUMNS, SMALL_BUCKET_MB = 512, 256, 1
PUSHES, UNCHECKED, WARM = 20, 6, 2
REHEARSED = 4  # pushes of each kind
MOST_GROWTH_GIB = 0.1
LIMIT_S = 60.0


def pushes(context: Context) -> None:
    """Every push arrives as what was sent, and memory of the GPU does not grow with them."""
    files = context.scratch / "ipc" if context.rehearsal else None
    if files is not None:
        files.mkdir()
    with _shared_memory(files):
        _push_often(context, files)


@contextmanager
def _shared_memory(files: Path | None) -> Iterator[None]:
    """Have ``cuda`` be the GPU, or, where processes are to share files, what stands for one."""
    with use_gpu(files is not None):
        if files is not None:
            from tests.gpu import shared_memory

            shared_memory.set_up(files)
        yield


def _push_often(context: Context, files: Path | None) -> None:
    mine, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(other, files), daemon=True)
    process.start()
    other.close()  # so that the end of that process is seen here
    device = torch.device("cuda:0")
    shape, bucket_mb = ((ROWS, COLUMNS), BUCKET_MB) if files is None else ((SMALL_ROWS, SMALL_COLUMNS), SMALL_BUCKET_MB)
    tensors = {f"{i}.weight": torch.randn(shape, device=device, dtype=torch.bfloat16) for i in range(TENSORS)}
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    checked, plain = (
        Publisher(
            Weights(transfer="ipc", bucket_mb=bucket_mb, checksum=checksum), device, lambda: iter(tensors.items())
        )
        for checksum in (True, False)
    )
    n_checked, n_plain = (PUSHES, UNCHECKED) if files is None else (REHEARSED, REHEARSED)
    free, times = [], []
    for version in range(1, n_checked + 1):
        tensors["0.weight"].fill_(version)  # what comes is this version and no other
        _push(checked, version, mine)
        free.append(_free_gib())
    grown = free[WARM - 1] - free[-1]
    context.note(pushes=n_checked, gib=n_bytes / (1 << 30), memory_grown_gib=grown)
    for version in range(n_checked + 1, n_checked + 1 + n_plain):
        tensors["0.weight"].fill_(version)
        times.append(_push(plain, version, mine))
    mine.send(None)
    process.join(LIMIT_S)
    kept = _kept_of_a_reader_that_is_gone(plain, n_checked + n_plain + 1)
    copies = [_copy_s(tensors) for _ in range(n_plain)]
    speed, copying = (n_bytes / 1e9 / statistics.median(result[WARM:]) for result in (times, copies))
    context.note(gb_per_s=speed, copy_gb_per_s=copying)
    require(grown < MOST_GROWTH_GIB, f"{grown:.2f} GiB of the GPU's memory were lost in {n_checked} pushes")
    require(kept == 0, f"{kept} bytes of a bucket are kept for a process that is gone")
    require(process.exitcode == 0, f"the receiving process ended with {process.exitcode}")


def _kept_of_a_reader_that_is_gone(publisher: Publisher, version: int) -> int:
    """Bytes that stay allocated of a bucket that nobody opens."""
    before = torch.cuda.memory_allocated()
    publisher.pack(version, 0, packs=True)
    publisher.sender.forget_receivers()
    publisher.sender.release()
    return torch.cuda.memory_allocated() - before


def _push(publisher: Publisher, version: int, there: Connection) -> float:
    """Seconds until the other process has all of it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in itertools.count():
        bucket = publisher.pack(version, number, packs=True)
        there.send(bucket)
        require(there.poll(LIMIT_S), f"{bucket} did not arrive within {LIMIT_S:g} s")
        answer = there.recv()
        require(answer == bucket.number, f"{bucket}: {answer}")
        if bucket.last:
            break
    publisher.sender.release()
    return time.perf_counter() - began


def _receive(there: Connection, files: Path | None) -> None:
    """In another process on the same GPU: take buckets until there are no more."""
    with _shared_memory(files):
        receiver = IpcReceiver(Weights(transfer="ipc"), torch.device("cuda:0"))
        while (bucket := there.recv()) is not None:
            there.send(_answer(bucket, receiver))


def _answer(bucket: Bucket, receiver: IpcReceiver) -> Any:
    """The bucket's number where it is what it should be, else what is wrong."""
    try:
        first = receiver.receive(bucket).get("0.weight")
        if first is None or bool((first == bucket.version).all()):
            return bucket.number
        return f"holds {float(first.flatten()[0])}, not version {bucket.version}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _free_gib() -> float:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] / (1 << 30)


def _copy_s(tensors: dict[str, torch.Tensor]) -> float:
    """Seconds of a copy of all tensors within the GPU, in buckets as they travel, allocation included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for tensor in tensors.values():
        tensor.clone()
    torch.cuda.synchronize()
    return time.perf_counter() - began
