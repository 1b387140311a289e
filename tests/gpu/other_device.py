"""A device that is not the host, for machines without a GPU: what is to be on ``cuda`` lies there, and says so.

Its tensors wrap one of the host's each and compute with that. As on a GPU, an operation on tensors of both raises
RuntimeError, and a copy to the host that is not waited for is nonsense until an event, a stream or another copy is.
Takes torch's place for third-party devices, for the life of the process: for a process of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gkd.actor import loading

NAME = "other"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.to.device, aten.to.dtype, aten.to.dtype_layout)
"""The later ones come whole within torch.inference_mode."""
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""A GPU's tensors may be indexed by the host's."""
MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor)

pinned: set[int] = set()
"""Addresses of the host's memory that was pinned."""
late: list[tuple[Tensor, Tensor]] = []
"""Copies to the host that nobody has waited for: target and source."""


class OnDevice(torch.Tensor):
    """A tensor of the device, whose numbers are in ``host``."""

    host: Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, host: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        return made

    def untyped_storage(self) -> Any:
        """Return a storage to be compared by its address, as FSDP2 does."""
        return self.host.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def is_device(device: Any) -> bool:
    """Return whether a device, or its name, is this one."""
    return device is not None and torch.device(device).type == NAME


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation with the host's numbers. Raises RuntimeError where tensors of both take part."""
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if func in COPIES:
        return _copied(func, args[0], args[1:], kwargs)
    if func is aten.copy_.default:
        _copy(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        return args[0]
    if func is aten._local_scalar_dense.default:
        arrive()
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    device = kwargs.get("device")
    if not ours and not is_device(device):
        return func(*args, **kwargs)
    strange = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    alone = len(tensors) == 1 and is_device(device)  # empty_like(tensor, device=...)
    if strange and func not in INDEXED and not alone:
        raise RuntimeError(f"{func}: a tensor {tuple(strange[0].shape)} of the host among the device's")
    result = func(*tree_map(host_of, args), **tree_map(host_of, kwargs))
    if device is not None and not is_device(device):
        return result
    same = {id(tensor.host): tensor for tensor in ours}  # what is changed in place stays the same tensor
    return tree_map(lambda x: same.get(id(x), OnDevice(x)) if isinstance(x, Tensor) else x, result)


def host_of(value: Any) -> Any:
    """Return what stands on the host for a tensor or the name of the device; anything else as it is."""
    if isinstance(value, OnDevice):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and is_device(value) else value


def _copied(func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    named = (value for value in args if isinstance(value, torch.device))
    stays = is_device(kwargs.get("device") or next(named, tensor.device))
    waits = not kwargs.get("non_blocking", False)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
    host = host_of(tensor)
    copy: Tensor = func(host, *tree_map(host_of, args), **kwargs)
    if stays == isinstance(tensor, OnDevice):
        return tensor if copy is host else OnDevice(copy) if stays else copy
    copy = copy.clone() if copy is host else copy
    if stays:
        if not waits and host.numel() and host.data_ptr() not in pinned:
            raise RuntimeError(f"{tuple(host.shape)}: from memory that is not pinned a copy waits for the device")
        return OnDevice(copy)
    _copy(copy, OnDevice(copy.clone()), not waits)
    return copy


def _copy(target: Tensor, source: Tensor, late_is_enough: bool) -> None:
    if late_is_enough and isinstance(source, OnDevice) and not isinstance(target, OnDevice):
        target.fill_(torch.nan if target.is_floating_point() else -7)
        late.append((target, source.host.clone()))
        return
    arrive()
    host_of(target).copy_(host_of(source))


def pin(tensor: Tensor, *_: Any) -> Tensor:
    """Return the same tensor, from which the device copies by itself."""
    pinned.add(tensor.data_ptr())
    return tensor


def arrive() -> None:
    """Do the copies that nobody has waited for."""
    with torch.inference_mode():
        for target, source in late:
            target.copy_(source)
    late.clear()


class Operations(TorchDispatchMode):
    """Makes new tensors on the device where they are to be there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # by what it is of
        return compute(func, args, kwargs or {})


class Names(TorchFunctionMode):
    """Calls the device by its own name before torch looks for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_own_name, args), tree_map(_own_name, kwargs or {})
        if func in MADE_OF_NUMBERS and is_device(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            arrive()
            return args[0].host.tolist()
        return func(*args, **kwargs)


def _own_name(value: Any) -> Any:
    is_gpu = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cuda"
    return torch.device(NAME, 0) if is_gpu else value


class Stream:
    """The device's one queue of work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a GPU's takes."""

    def wait_stream(self, _: Stream) -> None:
        """Wait on the device, not here."""

    def wait_event(self, _: Event) -> None:
        """Wait on the device, not here."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event."""
        return event or Event()

    def synchronize(self) -> None:
        """Wait here."""
        arrive()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        """Go on in the same queue."""


class Event:
    """A moment in the device's work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a GPU's takes."""

    def record(self, *_: Any) -> None:
        """Stand for now."""

    def wait(self, *_: Any) -> None:
        """Wait on the device, not here."""

    def synchronize(self) -> None:
        """Wait here."""
        arrive()


class Module:
    """What torch asks ``torch.other`` for, as it asks ``torch.cuda``."""

    Stream, Event = Stream, Event
    chosen: ClassVar[list[int]] = []
    """Devices that were chosen. Nothing runs on one before."""
    is_initialized = staticmethod(lambda: bool(Module.chosen))
    is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = chosen.append
    manual_seed_all = staticmethod(lambda _: None)
    stream = staticmethod(lambda stream: stream)
    current_stream = staticmethod(lambda *_: Stream())
    synchronize = staticmethod(lambda *_: arrive())
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Stand for the kernel that torch has on GPUs alone, [T, H, D]: the same mathematics in float32.

    Of a sequence with more keys than queries the last query is at the last key.
    """
    assert all(isinstance(bounds, OnDevice) and bounds.dtype == torch.int32 for bounds in (cu_seq_q, cu_seq_k))
    assert query.dtype == torch.bfloat16
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256  # the kernel's result has the queries' width
    arrive()  # by their host's numbers: what checkpointing computes again is in a thread without this file's modes
    bounds, parts = [list(pairwise(host_of(ends).tolist())) for ends in (cu_seq_q, cu_seq_k)], []
    assert max_q == max_k == max(b - a for a, b in bounds[1])
    assert (len(query), len(key)) == (bounds[0][-1][1], bounds[1][-1][1])
    for (start, end), (first, last) in zip(*bounds, strict=True):
        q = query[start:end].float().transpose(0, 1)
        k, v = (x[first:last].float().transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
        place = torch.arange(last - first, device=query.device)
        back = place[start - end :, None] - place
        hidden = (back < 0) | (back > window_size[0]) if window_size[0] >= 0 else back < 0
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def set_up() -> None:
    """Register the device. Collectives on it are gloo's; torch need not guess which device is a rank's."""
    warnings.filterwarnings("error", message="It seems like you did not set/select the default device")
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch.cuda.Event, torch.cuda.Stream = Event, Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda stream: stream or Stream()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: Stream()  # type: ignore[assignment, return-value]
    torch.cuda.empty_cache = lambda: None
    torch.cuda.set_device = Module.set_device
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.Tensor.pin_memory = pin  # type: ignore[assignment, method-assign]
    varlen.varlen_attn = varlen_attn  # type: ignore[assignment]
    join, mesh = dist.init_process_group, dist.device_mesh.init_device_mesh
    dist.init_process_group = lambda backend, **more: join(backend.replace("cuda:nccl", f"{NAME}:gloo"), **more)
    dist.device_mesh.init_device_mesh = lambda kind, *more, **names: mesh(kind.replace("cuda", NAME), *more, **names)
    # A model that is moved keeps its parameters, as between the host and CUDA: the optimizer has them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Wrapped tensors have no memory of their own: FSDP2 cannot give it back, nor exchange a tensor of the host for one.
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda _: None
    _fsdp_init._move_states_to_device = lambda *_: None
    shard = loading.shard

    def moved_and_sharded(student: Any, mesh: Any, *more: Any) -> None:
        if mesh.device_type == NAME:
            student._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(NAME))
        shard(student, mesh, *more)

    loading.shard = moved_and_sharded


@contextmanager
def entered() -> Iterator[None]:
    """Have ``cuda`` be the device."""
    with Names(), Operations():
        yield
