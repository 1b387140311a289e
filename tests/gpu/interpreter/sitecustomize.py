"""What vLLM runs on GPUs, on a CPU: model runner V2, asynchronous scheduling, and kernels by Triton's interpreter.

A process that has this folder in PYTHONPATH, and every process that it starts, imports this module before anything
else. With it ``PYTHONPATH=tests/gpu/interpreter python tests/gpu/acceptance.py --rehearse`` rehearses what runs on a
GPU but for CUDA itself: graphs, compiled layers, and transfers between devices. A step takes a hundred times as long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def _add_cpu(backends: ModuleType) -> None:
    """Have vLLM find Triton usable: it asks for a backend for CPUs, which the interpreter does without."""
    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def _schedule_asynchronously(cpu: ModuleType) -> None:
    """Schedule the next pass while one is under way, which vLLM switches off on CPUs: models that pool do on none."""
    check = cpu.CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        check(config)
        if config.model_config is not None and config.model_config.runner_type != "pooling":
            config.scheduler_config.async_scheduling = True

    cpu.CpuPlatform.check_and_update_config = staticmethod(checked)


def _complete(interpreter: ModuleType) -> None:
    """Give kernels tensors where the interpreter leaves numbers of Python's: the steps of a range, and floats."""
    import numpy as np
    import triton.language as tl

    convert, patch = interpreter._implicit_cvt, interpreter._patch_lang_core

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    def steps(first: Any, second: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
        start, stop = (0, first) if second is None else (first, second)
        return map(convert, range(int(start), int(stop), int(step)))

    def patched(language: ModuleType, scope: Any) -> None:
        patch(language, scope)
        scope.set_attr(language, "range", steps)

    interpreter._implicit_cvt, interpreter._patch_lang_core = converted, patched


def _without_libdevice(module: ModuleType) -> None:
    """Have Liger's norms take the square root of Triton's own language: the device's library has no interpreter."""
    import triton.language as tl

    module.rsqrt = lambda x: 1.0 / tl.sqrt(x)


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "triton.backends": _add_cpu,
    "triton.runtime.interpreter": _complete,
    "vllm.platforms.cpu": _schedule_asynchronously,
    "liger_kernel.ops.rms_norm": _without_libdevice,
}


class _ChangedModules(MetaPathFinder):
    """Changes modules as they are imported, so that a process without them imports none."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGES.pop(name, None)
        spec = find_spec(name) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Changing(spec.loader, change)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


sys.meta_path.insert(0, _ChangedModules())
