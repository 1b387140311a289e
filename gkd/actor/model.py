"""The student: a Hugging Face causal language model, sharded by FSDP2, whose head runs a few positions at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gkd.actor.compiling import Compilation
from gkd.actor.compute_copies import ComputeCopies
from gkd.actor.precision import find_exact_modules
from gkd.actor.quantize import dequantize_weights, find_packed_parameters, find_quantized_layers
from gkd.losses.micro_batch import MicroBatch
from gkd.losses.outcomes import use_kernels
from gkd.modeling.attention import can_share_beginnings
from gkd.modeling.backbone import decoder_layers, hidden_states, is_packed, takes_rows
from gkd.modeling.head import Head
from gkd.weights.file_names import FileNames

ObjectiveResult = TypeVar("ObjectiveResult")


class Student(nn.Module):
    """A language model together with its loss, so that FSDP2 gathers the head's weights around both.

    ``lm`` is the Hugging Face model; what is trained of it is in float32. ``exact``: names of parameters that are
    computed with, and sent, in float32 as well. Calling it evaluates an objective on one micro-batch.
    """

    def __init__(self, lm: PreTrainedModel, has_adapter: bool, files: FileNames, exact: frozenset[str]) -> None:
        super().__init__()
        self.lm, self.has_adapter, self.files, self.exact = lm, has_adapter, files, exact
        self.head = Head(lm)
        """Logits [n, V] of hidden states [n, D]."""
        self.compilation: Compilation | None = None
        """How its layers are compiled."""
        self.copies: ComputeCopies | None = None
        """What it computes with, where one rank holds it whole, and its weights are of another type."""
        self.began = -math.inf
        """The latest micro-batch (``time.monotonic``)."""

    @property
    def is_packed(self) -> bool:
        """Whether sequences go through it laid end to end."""
        return is_packed(self.lm)

    @property
    def takes_rows(self) -> bool:
        """Whether some or all of its layers are given rows of whole sequences, with padding."""
        return takes_rows(self.lm)

    def can_share_prompts(self, device: torch.device) -> bool:
        """Return whether samples of one prompt can be computed with the prompt once on ``device``."""
        return self.is_packed and can_share_beginnings(device.type)

    def forward(
        self, micro: MicroBatch, objective: Callable[[Tensor, Callable[[Tensor], Tensor]], ObjectiveResult]
    ) -> ObjectiveResult:
        """Evaluate ``objective(hidden [N, D], head)`` on the hidden states that predict the N response tokens."""
        self.began = time.monotonic()
        hidden = self.compute_hidden(micro)[micro.rows]
        head = self.head.linear(hidden) or self.head
        if self.compilation is None:
            return objective(hidden, head)
        with self.compilation.allow_compiling(), use_kernels(self.compilation.kernels):
            return objective(hidden, head)

    def use_compute_type(self) -> AbstractContextManager[None]:
        """Have it compute in the compute type, forward and backward; nothing else may read its weights meanwhile."""
        return nullcontext() if self.copies is None else self.copies.install()

    def compute_hidden(self, micro: MicroBatch) -> Tensor:
        """Return final hidden states [T, D] of every token of a micro-batch."""
        packed = micro.sequences
        if self.compilation is None:
            return hidden_states(self.lm, packed)
        with self.compilation.allow_compiling():
            return hidden_states(self.lm, self.compilation.pad(packed))[: len(packed)]

    def train(self, mode: bool = True) -> Student:
        """Set what gradient checkpointing and an adapter's dropout look at to training mode.

        Nothing else ever is: a student that forgets or routes at random is not the one that sampled, and every
        log-probability would differ.
        """
        super().train(False)
        self.training = mode
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False) or isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = mode
        for layer in find_quantized_layers(self.lm).values():
            layer.training = True  # otherwise bitsandbytes lays its weight out anew on a CPU, and not back
        return self

    def gather_full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, gathered from all ranks, by its name in transformers.

        An adapter is added to what it adapts. A collective: every rank has to iterate, in step. Weights tied to another
        are named once. Without an adapter, which is added before anything is rounded, it is shards of ``dtype`` that
        are gathered. Buffers and exact parameters stay of their type, as they do while the model computes: of routers
        and their biases (DeepSeek V3) bfloat16 keeps too little to choose experts by.
        """
        if not self.has_adapter:
            for name, value in named_tensors(self.lm):
                yield name, gather_tensor(value.detach(), self.choose_sent_type(name, value, dtype))
            return
        from gkd.actor.lora import merge

        fixed_names = self.exact | {
            name for name, value in named_tensors(self.lm) if not isinstance(value, nn.Parameter)
        }
        stored = ((name, gather_tensor(value.detach())) for name, value in named_tensors(self.lm))
        for name, whole in merge(self.lm, dequantize_weights(self.lm, stored), gather_tensor):
            yield name, whole.to(dtype) if whole.is_floating_point() and name not in fixed_names else whole

    def choose_sent_type(self, name: str, value: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the type that a tensor of the model is sent in where weights are sent as ``dtype``."""
        return dtype if isinstance(value, nn.Parameter) and name not in self.exact else value.dtype

    def find_exact_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that are computed with in float32."""
        if not self.exact:
            return set()
        from gkd.actor.lora import name_without_adapter  # imports peft, a second of every start

        return {p for name, p in self.lm.named_parameters() if name_without_adapter(name) in self.exact}

    def file_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by the names, and in the shapes, that the model's files have. A collective as well."""
        return self.files.convert(self.gather_full_tensors(dtype))

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's parameters, gathered. A collective."""
        from gkd.actor.lora import is_adapter

        return ((name, gather_tensor(value.detach())) for name, value in named_tensors(self.lm) if is_adapter(name))

    def adapter_file_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the same as ``dtype``, by the names in peft's files. A collective as well."""
        from gkd.actor.lora import name_in_peft

        return ((name_in_peft(name), whole.to(dtype)) for name, whole in self.adapter_tensors())


def cast_shard(tensor: DTensor, dtype: torch.dtype | None) -> Tensor:
    """Return this rank's part of a tensor where the ranks compute, as ``dtype`` if it is of floats."""
    local = tensor.to_local()
    return local.to(device=tensor.device_mesh.device_type, dtype=dtype if local.is_floating_point() else None)


def gather_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor gathered from all ranks, as ``dtype`` if it is of floats and that is given. A collective.

    The shards are cast first, and moved to where the ranks compute: those that live in the host's memory would go from
    rank to rank by gloo. What one rank has alone may be the parameter's own memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype=dtype if tensor.is_floating_point() else None)
    local, mesh = cast_shard(tensor, dtype), tensor.device_mesh
    if mesh.size() == 1:  # nothing is anywhere else
        return local
    sharded: Tensor = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
    return sharded


def named_tensors(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers; weights tied to another once."""
    yielded: set[int] = set()
    for name, value in lm.state_dict(keep_vars=True).items():
        if id(value) not in yielded:
            yielded.add(id(value))
            yield name, value


def shard(student: Student, mesh: DeviceMesh, compute_dtype: torch.dtype, offload: bool = False) -> None:
    """Shard in place over the ranks of a one-dimensional mesh: every decoder layer by itself, the rest as the root.

    Parameters, gradients and optimizer state stay in float32, with ``offload`` in the host's memory; computation is in
    ``compute_dtype``, within layers of modules whose parameters are all exact in float32.
    """
    # Inputs stay as they are, as without FSDP2: what the loss is worked out from, and what layers are given in float32
    # by models that compute it so, such as rotary embeddings (OLMo) or the residual stream (Mamba).
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    whole = find_packed_parameters(student)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    layers = decoder_layers(student.lm)
    for part in find_exact_modules(layers, student.find_exact_parameters()):
        fully_shard(part, mesh=mesh, mp_policy=exact, offload_policy=place)
    for part in (*layers, student):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=place, ignored_params=whole)
