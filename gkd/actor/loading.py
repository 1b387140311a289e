"""Reading the student from its files: whole in one process, or every rank its shards alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gkd.actor.compiling import Compilation
from gkd.actor.compute_copies import ComputeCopies
from gkd.actor.model import Student, named_tensors, shard
from gkd.actor.precision import find_exact, get_dtypes, round_buffers
from gkd.actor.quantize import find_packed_parameters, make_load_arguments
from gkd.config import Lora
from gkd.config.actor import MOST_COPIED
from gkd.errors import ConfigError
from gkd.modeling.attention import PACKED
from gkd.modeling.backbone import choose_attention, pack_or_pad
from gkd.modeling.head import Head
from gkd.modeling.reading import read_model
from gkd.modeling.states import give_rows_to_state_layers
from gkd.weights.file_names import FileNames

Compile = Callable[[PreTrainedModel], Compilation | None]
CPU = torch.device("cpu")
META = torch.device("meta")
ATTENTION = (*PACKED, "sdpa", "eager")
"""What a student may have."""


def load_sharded(
    path: str,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    gradient_checkpointing: bool = False,
    lora: Lora | None = None,
    offload: bool = False,
    compiled: Compile = lambda lm: None,
    most_copied: int = MOST_COPIED,
) -> Student:
    """Read a model directory and shard it over the ranks of ``mesh``, as :func:`load` and then :func:`shard` would.

    A rank that is alone has nothing to share: its student is left whole (:class:`ComputeCopies`), unless that copies
    more than ``most_copied`` numbers. Otherwise the first rank alone reads the weights and broadcasts one tensor after
    the other; the others hold the shards that they keep and one whole tensor at a time. ``compiled`` is given the model
    before it is sharded. With ``lora.quantize`` every rank reads all of it, to its device: packed weights are whole on
    every rank. A collective. Raises what :func:`load` raises.
    """
    quantize = lora is not None and lora.quantize is not None
    if mesh.size() == 1 or quantize:
        student = load(path, gradient_checkpointing, lora, device, dtype)
        student.compilation = compiled(student.lm)
        copies = ComputeCopies(student, dtype, find_packed_parameters(student) | student.find_exact_parameters())
        if mesh.size() > 1 or offload or copies.n_numbers > most_copied:
            shard(student, mesh, dtype, offload)
            return student
        if not quantize:
            student.to(device)
        student.copies = copies if copies.n_numbers else None
        return student
    whole = load(path, False, lora, device, dtype) if mesh.get_local_rank() == 0 else None
    used = 0 if whole is None else ATTENTION.index(whole.lm.config._attn_implementation)
    number = torch.tensor(used, dtype=torch.int32, device=device)
    dist.broadcast(number, group=mesh.get_group(), group_src=0)
    student = load(path, gradient_checkpointing, lora, device, dtype, attention=ATTENTION[int(number)])
    student.compilation = compiled(student.lm)
    shard(student, mesh, dtype, offload)
    student.to_empty(device=CPU if offload else device)
    _fill(student, whole, mesh, device)
    return student


@torch.no_grad()
def _fill(student: Student, whole: Student | None, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the empty ``student`` what the first rank has in ``whole``, which is empty after that. A collective."""
    group = mesh.get_group()
    source = {} if whole is None else dict(named_tensors(whole.lm))
    for name, value in named_tensors(student.lm):
        if not isinstance(value, nn.Parameter):
            continue  # a buffer, below
        full = torch.empty(value.shape, dtype=value.dtype, device=device)
        if whole is not None:
            full.copy_(source[name])
            source[name].data = torch.empty(0, dtype=full.dtype)  # it is not needed any more
        dist.broadcast(full, group=group, group_src=0)
        assert isinstance(value, DTensor), "every parameter is sharded"
        value.to_local().copy_(distribute_tensor(full, mesh, value.placements, src_data_rank=None).to_local())
    for holder, name, value in list(_find_computed_tensors(student.lm)):
        tensor = torch.empty_like(value, device=device)
        if whole is not None:
            tensor.copy_(getattr(whole.lm.get_submodule(holder), name))
        dist.broadcast(tensor, group=group, group_src=0)
        setattr(student.lm.get_submodule(holder), name, tensor)
    student.head = Head(student.lm)  # which holds what the model held before


def _find_computed_tensors(lm: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield module, name and value of every tensor that a model has computed for itself, as frequencies are."""
    for holder, module in lm.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield holder, name, value


def load(
    path: str | Path,
    gradient_checkpointing: bool = False,
    lora: Lora | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str | None = None,
) -> Student:
    """Read a model directory, parameters in float32, and put an adapter beside it if ``lora`` has a rank.

    ``device`` and ``dtype`` are those that are computed with. On a GPU, what is under an adapter and never trained is
    read in ``dtype``, as the engines have it. With ``lora.quantize`` it is 4-bit, and on ``device``. With
    ``attention``, which the model then has, no weight is read: the student is on the meta device. Nothing is looked up
    on a hub. Raises ConfigError for weights that are not all there, or tied and different, for models that cannot be
    computed (:func:`pack_or_pad`), and for adapters that the model cannot have.
    """
    adapted = lora is not None and lora.r is not None
    lm = read_model(
        str(path),
        f"model.path={path}",
        dtype if adapted and device.type == "cuda" else torch.float32,
        lambda config: attention or choose_attention(config),
        **(make_load_arguments(device, dtype) if lora is not None and lora.quantize else {}),
        **({} if attention is None else {"device_map": "meta"}),
    )
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _remove_dropout(lm)
    as_in_files = build_empty(AutoConfig.from_pretrained(path, local_files_only=True), dtype)
    dtypes = get_dtypes(as_in_files, dtype)
    files = FileNames(lm, {name: tuple(value.shape) for name, value in named_tensors(as_in_files)})
    shared = {name for name, _ in as_in_files.named_parameters()}
    if apart := [name for name, _ in lm.named_parameters() if name not in shared]:  # transformers logs it and goes on
        raise ConfigError(
            f"model.path={path}: its files have a {apart[0]} of its own, which its config.json ties to another weight, "
            "as engines do; tie_word_embeddings=false there would have both keep it"
        )
    if lora is not None and adapted:
        from gkd.actor.lora import add_adapter  # imports peft, a second of every start

        add_adapter(lm, lora)
    student = Student(lm, adapted, files, find_exact(as_in_files, dtypes, dtype))
    student.eval()
    if attention is None:
        pack_or_pad(lm, f"model.path={path}", device)
    else:
        give_rows_to_state_layers(lm)
    round_buffers(lm, dtypes)
    student.train()
    return student


def build_empty(config: PretrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return a model of that kind without weights."""
    with META:
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return lm


def _remove_dropout(lm: nn.Module) -> None:
    """Take the model's own dropout away, also from layers that gradient checkpointing needs in training mode."""
    for module in lm.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
