"""The actor's decoder layers compiled against the same ones as they are: loss and gradients of some packs.

Before that, in the same process, what the loss takes at a large vocabulary (:mod:`tests.gpu.checks.loss`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.compiling import compile_student
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Rollout
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.objective import objective
from gkd.modeling import compiling
from tests.actor import models
from tests.gpu.checks.context import Context, require
from tests.gpu.checks.loss import note_losses
from tests.losses.test_micro_batch import micro_batch

BUDGET = 400
SHAPE = {**models.SHAPE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MOST = 3e-2  # relative, of bfloat16, whose order of operations differs


def layers(context: Context) -> None:
    """On the GPU by inductor, in bfloat16; in a rehearsal captured and differentiated as graphs, without a compiler."""
    device, dtype = ("cpu", torch.float32) if context.rehearsal else ("cuda", torch.bfloat16)
    if context.rehearsal:
        compiling.BACKEND = "aot_eager"
    note_losses(context)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(context.scratch / "compiled")
    plain, compiled = (load(context.scratch / "compiled").to(device, dtype) for _ in range(2))
    compiled.compilation = compile_student(compiled.lm, True, BUDGET, torch.device(device))
    require(compiled.compilation is not None, "no layer is compiled")
    worst = max(difference(plain, compiled, n, device) for n in (3, 12, 25))
    context.note(worst=worst)
    require(worst < (1e-5 if context.rehearsal else MOST), f"compiled layers differ by {worst:.1e}")


def difference(plain: Student, compiled: Student, n_samples: int, device: str) -> float:
    """The largest relative difference of the loss and of each weight's gradient."""
    micro = micro_batch(models.scored(n_samples, seed=n_samples)).to(torch.device(device))
    return worst_apart(loss_and_gradients(compiled, micro), loss_and_gradients(plain, micro))


def worst_apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest of the differences, each beside ``theirs``; NaN counts as infinite."""
    apart = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True)]
    return max(value if value == value else float("inf") for value in apart)


def loss_and_gradients(student: Student, micro: MicroBatch) -> list[Tensor]:
    """The loss of a micro-batch, and the gradient of every weight."""
    student.zero_grad()
    loss, _ = student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))
    loss.backward()
    return [loss.detach(), *(p.grad for p in student.parameters() if p.grad is not None)]
