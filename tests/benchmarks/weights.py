"""Speed of a push of weights between two processes, by every way that this machine allows, against copying alone.

    python tests/benchmarks/weights.py [--gib 3.0] [--bucket-mb 512] [--rounds 5] [--checksum]

Tensors of 64 MiB in bfloat16 that add up to ``--gib``, from a process that holds them to another that copies each piece
out and touches it; no model is loaded from them. ``object_store`` runs on CPUs (and through the host on a GPU), ``ipc``
with both processes on one GPU, ``nccl`` with a second GPU. Beside them the copy alone: of the same tensors within the
memory of one device. GB/s are 10^9 bytes of weights over the median round's time from first gathering to last loading.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import torch

from gkd.cluster.gpu import nvml_uuids
from gkd.weights import ipc, nccl, object_store
from gkd.weights.pieces import Packer, Piece, unpack

TENSOR_BYTES = 64 << 20
LIMIT_S = 300.0


class Sender:
    """Holds weights and sends them."""

    def __init__(self, n_tensors: int, bucket_bytes: int, checksum: bool, on_gpu: bool) -> None:
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.bucket_bytes, self.checksum = bucket_bytes, checksum
        shape = (TENSOR_BYTES // 2 // 4096, 4096)
        self.tensors = {
            f"layer.{i}.weight": torch.randn(shape, device=self.device, dtype=torch.bfloat16) for i in range(n_tensors)
        }
        self.sender: Packer | None = None

    def publish(self) -> object_store.Push:
        return object_store.send(self.tensors.items(), 1, self.bucket_bytes, self.checksum)

    def open(self, way: str) -> None:
        if self.sender is None:
            kind = {"ipc": ipc.Sender, "nccl": nccl.Sender}[way]
            self.sender = kind(self.device, self.bucket_bytes, self.checksum)
        self.sender.open(self.tensors.items(), 1, packs=True)

    def next(self) -> Piece | None:
        return self.sender.next()

    def new_id(self) -> str:
        return nccl.new_id()

    def join(self, unique_id: str) -> None:
        self.open("nccl")
        self.sender.join(unique_id, 2)

    def send(self) -> None:
        self.sender.send()

    def copy_s(self) -> float:
        """Seconds that copying all tensors within this device takes."""
        found = [torch.empty_like(t) for t in self.tensors.values()]
        self._wait()
        began = time.perf_counter()
        for there, tensor in zip(found, self.tensors.values(), strict=True):
            there.copy_(tensor)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Receiver:
    """Takes weights."""

    def __init__(self, on_gpu: bool) -> None:
        self.device, self.group = torch.device("cuda:0" if on_gpu else "cpu"), None

    def receive(self, push: object_store.Push) -> None:
        for piece in object_store.receive(push, LIMIT_S):
            self._touch({name: tensor.to(self.device) for name, tensor in piece.items()})

    def join(self, unique_id: str) -> None:
        import base64

        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self.group = uid_init_process_group(base64.b64decode(unique_id), 1, 2, 0)

    def take(self, piece: Piece) -> None:
        packed = nccl.receive(piece, self.group, self.device) if self.group else ipc.receive(piece, self.device)
        self._touch(unpack(piece, packed))

    def _touch(self, tensors: dict[str, torch.Tensor]) -> None:
        assert all(torch.isfinite(t.flatten()[-1]) for t in tensors.values())


def ask(call: Any) -> Any:
    return ray.get(call, timeout=LIMIT_S)


def by_object_store(sender: Any, receiver: Any) -> None:
    ask(receiver.receive.remote(ask(sender.publish.remote())))


def by_ipc(sender: Any, receiver: Any) -> None:
    ask(sender.open.remote("ipc"))
    while (piece := ask(sender.next.remote())) is not None:
        ask(receiver.take.remote(piece))


def by_nccl(sender: Any, receiver: Any) -> None:
    ask(sender.open.remote("nccl"))
    while (piece := ask(sender.next.remote())) is not None:
        ask([sender.send.remote(), receiver.take.remote(piece)])


def measure(way: str, push: Callable[[Any, Any], None], gpus: list[int], options: argparse.Namespace) -> None:
    """Push some times between two fresh processes and print the speed. ``gpus``: those of sender and receiver."""

    def start(cls: type, gpu: int, *args: Any) -> Any:
        variables = {"CUDA_VISIBLE_DEVICES": str(gpu), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return ray.remote(cls).options(num_cpus=0, runtime_env={"env_vars": variables}).remote(*args)

    n = max(1, int(options.gib * (1 << 30)) // TENSOR_BYTES)
    sender = start(Sender, (gpus or [0])[0], n, options.bucket_mb << 20, options.checksum, bool(gpus))
    receiver = start(Receiver, (gpus or [0])[-1], bool(gpus))
    if way == "nccl":
        unique_id = ask(sender.new_id.remote())
        ask([sender.join.remote(unique_id), receiver.join.remote(unique_id)])
    times, copies = [], []
    for round_ in range(-1, options.rounds):
        began = time.perf_counter()
        push(sender, receiver)
        taken, copied = time.perf_counter() - began, ask(sender.copy_s.remote())
        if round_ >= 0:
            times.append(taken)
            copies.append(copied)
    speed, copy = (n * TENSOR_BYTES / 1e9 / statistics.median(found) for found in (times, copies))
    print(f"{way:12} {'GPU' if gpus else 'CPU'}: {speed:8.2f} GB/s; copying alone {copy:8.2f} GB/s", flush=True)
    for process in (sender, receiver):
        ray.kill(process)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checksum", action="store_true")
    options = parser.parse_args()
    n_gpus = len(nvml_uuids()) if torch.version.cuda else 0
    ray.init(address="local", num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        measure("object_store", by_object_store, [0, min(1, n_gpus - 1)] if n_gpus else [], options)
        if n_gpus:
            measure("ipc", by_ipc, [0, 0], options)
        else:
            print("ipc          needs a CUDA GPU and the CUDA build of torch")
        if n_gpus > 1:
            measure("nccl", by_nccl, [0, 1], options)
        else:
            print("nccl         needs two CUDA GPUs and the CUDA build of vLLM")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
