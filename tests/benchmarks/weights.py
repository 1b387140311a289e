"""Speed of a push of weights between two processes, by every way that this machine allows, against copying alone.

    python tests/benchmarks/weights.py [--gib 3.0] [--bucket-mb 512] [--rounds 5] [--checksum]

Tensors of 64 MiB in bfloat16 that add up to ``--gib``, from a process that holds them to another that copies each
bucket out and touches it; no model is loaded from them. ``object_store`` runs on CPUs (and through the host on a GPU),
``ipc`` with both processes on one GPU, ``nccl`` with a second GPU; vLLM's own ways for shards need its engines at both
ends and are left out. Beside them the copy alone: of the same tensors within the memory of one device. GB/s are 10^9
bytes of weights over the median round's time from first gathering to last loading.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import ray
import torch

from gkd.cluster.gpu import nvml_uuids
from gkd.config import Weights
from gkd.weights.delivery import Delivery, Destination, Push
from gkd.weights.publishing import Publisher
from gkd.weights.transfer import Bucket

TENSOR_BYTES = 64 << 20
LIMIT_S = 300.0


class Sender:
    """Holds weights and sends them."""

    def __init__(self, n_tensors: int, bucket_bytes: int, checksum: bool, on_gpu: bool) -> None:
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.settings: dict[str, Any] = {"bucket_mb": bucket_bytes >> 20, "checksum": checksum}
        shape = (TENSOR_BYTES // 2 // 4096, 4096)
        self.tensors = {
            f"layer.{i}.weight": torch.randn(shape, device=self.device, dtype=torch.bfloat16) for i in range(n_tensors)
        }

    def use(self, transfer: str) -> None:
        weights = Weights(transfer=transfer, **self.settings)
        self.publisher = Publisher(weights, self.device, lambda: iter(self.tensors.items()))

    def send(self, push: Push, receiver: Any) -> None:
        self.publisher.send(Delivery(push, [Destination(0, receiver, 1)]))

    def new_group(self) -> str:
        return self.publisher.sender.new_group()

    def join(self, address: str) -> None:
        self.publisher.sender.join(address, 2)

    def copy_s(self) -> float:
        """Seconds that copying all tensors within this device takes."""
        copies = [torch.empty_like(t) for t in self.tensors.values()]
        self._wait()
        began = time.perf_counter()
        for there, tensor in zip(copies, self.tensors.values(), strict=True):
            there.copy_(tensor)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Receiver:
    """Takes weights."""

    def __init__(self, on_gpu: bool) -> None:
        self.device = torch.device("cuda:0" if on_gpu else "cpu")

    def use(self, transfer: str) -> None:
        weights = Weights(transfer=transfer)
        self.receiver = weights.transfer_class.receiver(weights, self.device)

    def join(self, address: str) -> None:
        self.receiver.join(address, 1, 2)

    def load_bucket(self, push: Push, bucket: Bucket, n_senders: int) -> None:
        tensors = {name: tensor.to(self.device) for name, tensor in self.receiver.receive(bucket).items()}
        assert all(torch.isfinite(t.flatten()[-1]) for t in tensors.values())


def ask(call: Any) -> Any:
    return ray.get(call, timeout=LIMIT_S)


def push(number: int, sender: Any, receiver: Any) -> None:
    ask(sender.send.remote(Push(number, 1, LIMIT_S), receiver))


def measure(transfer: str, gpus: list[int], options: argparse.Namespace) -> None:
    """Push some times between two fresh processes and print the speed. ``gpus``: those of sender and receiver."""

    def start(cls: type, gpu: int, *args: Any) -> Any:
        variables = {"CUDA_VISIBLE_DEVICES": str(gpu), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return ray.remote(cls).options(num_cpus=0, runtime_env={"env_vars": variables}).remote(*args)

    n = max(1, int(options.gib * (1 << 30)) // TENSOR_BYTES)
    sender = start(Sender, (gpus or [0])[0], n, options.bucket_mb << 20, options.checksum, bool(gpus))
    receiver = start(Receiver, (gpus or [0])[-1], bool(gpus))
    ask([sender.use.remote(transfer), receiver.use.remote(transfer)])
    if transfer == "nccl":
        address = ask(sender.new_group.remote())
        ask([sender.join.remote(address), receiver.join.remote(address)])
    times, copies = [], []
    for round_ in range(-1, options.rounds):
        began = time.perf_counter()
        push(round_ + 2, sender, receiver)
        push_s, copied = time.perf_counter() - began, ask(sender.copy_s.remote())
        if round_ >= 0:
            times.append(push_s)
            copies.append(copied)
    speed, copy = (n * TENSOR_BYTES / 1e9 / statistics.median(seconds) for seconds in (times, copies))
    print(f"{transfer:12} {'GPU' if gpus else 'CPU'}: {speed:8.2f} GB/s; copying alone {copy:8.2f} GB/s", flush=True)
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
        measure("object_store", [0, min(1, n_gpus - 1)] if n_gpus else [], options)
        if n_gpus:
            measure("ipc", [0, 0], options)
        else:
            print("ipc          needs a CUDA GPU and the CUDA build of torch")
        if n_gpus > 1:
            measure("nccl", [0, 1], options)
        else:
            print("nccl         needs two CUDA GPUs and the CUDA build of vLLM")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
