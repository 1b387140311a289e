"""What vLLM's layer-wise reload lacks, around an update by any backend: copies past loaders, and kernels of a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from gkd.weights.vllm_direct import DirectCopies


class Reload:
    """Beside a backend of vLLM's, before it among the bases, whose start and finish begin and end a reload."""

    device: torch.device
    model: torch.nn.Module
    direct: DirectCopies | None = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. The base class would synchronise an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))  # type: ignore[attr-defined]
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @contextmanager
    def load_meanwhile(self) -> Iterator[None]:
        """Have the model load weights meanwhile, those that it copies past its loaders as well."""
        assert self.direct is not None, "a bucket came before the update was begun"
        with self.direct:
            yield
        self.direct.process(whole=False)

    def start_weight_update(self) -> None:
        """Begin the reload; on a CPU every layer is then prepared for its kernels as at the first load.

        vLLM prepares experts for its CPU kernels (padding, packing) only while they have no kernel yet, and a reload
        would leave raw weights where packed ones are read. No graph holds on to a kernel here, as it would on a GPU.
        """
        if self.device.type == "cpu":
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        super().start_weight_update()  # type: ignore[misc]
        self.direct = DirectCopies(self.model)

    def finish_weight_update(self) -> None:
        """Finish the reload; on a CPU also prepare layers whose weights came by way of another module, as tied heads.

        Such a layer shares its weight with the one that was reloaded, and has a copy of its own in its kernel's layout.
        """
        assert self.direct is not None, "an update ends that was not begun"
        self.direct.process(whole=True)
        self.direct = None
        super().finish_weight_update()  # type: ignore[misc]
        if self.device.type == "cpu":
            modules = list(self.model.modules())
            owners = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
            for module in modules:
                shared = any(owners[id(p)] > 1 for p in module._parameters.values() if p is not None)
                if shared and isinstance(quant_method := getattr(module, "quant_method", None), QuantizeMethodBase):
                    quant_method.process_weights_after_loading(module)
