"""AdamW, on the device or with its moments in the host's memory, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as adamw_step

from gkd.config import Actor
from gkd.errors import RunFailed

FUSED_ON = ("cpu", "cuda")
FLOOR = 0.1  # share of the peak that linear and cosine decay reach one step after the last
MOMENTS = "exp_avg", "exp_avg_sq"
SLICE = 1 << 24  # numbers of a moment that are on their way at a time, 64 MiB
SLICES = 3  # one that comes, one that is there, one that goes


def learning_rate(settings: Actor, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0): a linear rise over warmup_steps, then the chosen decay."""
    assert settings.lr is not None, "a whole configuration has decided it"
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.lr_decay == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    left = 1 - done if settings.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (FLOOR + (1 - FLOOR) * left)


def adamw(model: nn.Module, settings: Actor) -> torch.optim.AdamW:
    """Make AdamW, with its parameters' names; norms, biases and other vectors are not decayed.

    Where torch has it for the parameters' device, a step is one fused kernel: without it there is a loop over them on a
    CPU, and temporaries of the parameters' size on a GPU. With ``offload_optimizer`` it is :class:`HostAdamW` where
    the parameters are not in the host's memory themselves.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in trained if _is_decayed(name, p)], "weight_decay": settings.weight_decay},
        {"params": [(name, p) for name, p in trained if not _is_decayed(name, p)], "weight_decay": 0.0},
    ]
    beta1, beta2 = settings.betas
    groups = [group for group in groups if group["params"]]  # an adapter has no vectors
    fused = all(p.device.type in FUSED_ON and p.is_floating_point() for _, p in trained)
    on_host = settings.offload_optimizer and any(p.device.type != "cpu" for _, p in trained)
    made = HostAdamW if on_host else torch.optim.AdamW
    return made(groups, lr=learning_rate(settings, 0, 1), betas=(beta1, beta2), fused=fused)


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix, or several, and no biases of all experts or norms of all heads together.

    Cohere's norms of queries and keys have a row a head.
    """
    module = name.rpartition(".")[0]
    return parameter.ndim > 1 and not name.endswith("bias") and not module.endswith("norm")


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments stay in the host's memory, and come to the parameters' device for a step, slice by slice.

    They cross the host's link once each way a step, beside the computation. AdamW is elementwise: a step changes what
    :class:`torch.optim.AdamW` changes, to the last bit by the same kernel. Moments are there from the beginning, of the
    rank's own part of each parameter.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        for p in parameters_of(self):
            shard = take_local(p)
            self.state[p] = {"step": torch.zeros(())} | {name: _make_moment(shard) for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do a step on the gradients that there are, and wait until the moments are back."""
        changed = [p for p in parameters_of(self) if p.grad is not None]
        if not changed:
            return
        transit = _Transit(changed[0].device, min(SLICE, max(take_local(p).numel() for p in changed)))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group, transit)
        transit.finish()

    def _step_one(self, p: Tensor, group: dict[str, Any], transit: _Transit) -> None:
        assert p.grad is not None, "it has been asked for"
        state, device = self.state[p], take_local(p).device
        whole = [take_local(p).view(-1), take_local(p.grad).reshape(-1), *(state[name].view(-1) for name in MOMENTS)]
        for start in range(0, len(whole[0]), SLICE):
            weight, gradient, *moments = (values[start : start + SLICE] for values in whole)
            on_device = transit.bring(moments)
            adamw_step(
                [weight], [gradient], [on_device[0]], [on_device[1]], [],
                [torch.full((), float(state["step"]), device=device)],  # of this slice, whose step counts it up
                foreach=False, fused=group["fused"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
                lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            transit.write_back(moments, on_device)
        state["step"] += 1


class _Transit:
    """Brings slices of moments to a device and takes them back, on streams beside the one that computes.

    On a CPU they are there.
    """

    def __init__(self, device: torch.device, n: int) -> None:
        self._device, self._number = device, 0
        if device.type == "cpu":
            return
        self._slots = [[torch.empty(n, device=device) for _ in MOMENTS] for _ in range(SLICES)]
        self._coming, self._going = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._coming.wait_stream(torch.cuda.current_stream(device))  # what had the slots' memory before
        self._left: list[torch.cuda.Event | None] = [None] * SLICES

    def bring(self, moments: list[Tensor]) -> list[Tensor]:
        """Return the moments on the device, for the stream that computes."""
        if self._device.type == "cpu":
            return moments
        slot = self._number % SLICES
        with torch.cuda.stream(self._coming):
            if (left := self._left[slot]) is not None:
                self._coming.wait_event(left)
            places = zip(self._slots[slot], moments, strict=True)
            on_device = [to[: len(m)].copy_(m, non_blocking=True) for to, m in places]
            arrived = self._coming.record_event()
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return on_device

    def write_back(self, moments: list[Tensor], on_device: list[Tensor]) -> None:
        """Write back what :meth:`bring` brought, once it is computed."""
        if self._device.type == "cpu":
            return
        computed = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._going):
            self._going.wait_event(computed)
            for m, changed in zip(moments, on_device, strict=True):
                m.copy_(changed, non_blocking=True)
            self._left[self._number % SLICES] = self._going.record_event()
        self._number += 1

    def finish(self) -> None:
        """Wait until all are back: whoever reads them in the host's memory waits for no stream."""
        if self._device.type != "cpu":
            self._going.synchronize()


def _make_moment(weight: Tensor) -> Tensor:
    """Return zeros of a weight's shape in the host's memory, pinned where CUDA is to copy them.

    ``pin_memory`` would take the next power of two of bytes. Raises RunFailed where the system pins no more.
    """
    moment = torch.zeros(weight.shape, dtype=weight.dtype)
    if weight.device.type == "cuda" and moment.numel():
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(runtime.cudaHostRegister(moment.data_ptr(), moment.nbytes, 0)):
            raise RunFailed(
                f"actor.offload_optimizer: the host pins no {moment.nbytes:,} bytes more for the optimizer's moments "
                f"(cudaHostRegister: error {code}); containers and WSL limit what can be pinned"
            )
    return moment


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def take_local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def n_updates(optimizer: torch.optim.Optimizer) -> int:
    """Return the steps that it has done, those before a checkpoint included."""
    state: dict[str, torch.Tensor] = next(iter(optimizer.state.values()), {})
    return int(state.get("step", 0))
