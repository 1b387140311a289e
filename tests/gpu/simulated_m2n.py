"""``nccl_m2n`` between workers on simulated GPUs, with gloo in place of NVIDIA's libraries (tests/vllm/weights).

A process that loads this transfer has these in their places from then on, before its engine starts.
"""

from __future__ import annotations

from torch.nn.functional import linear
from vllm.model_executor.layers import utils

from tests.vllm.weights import gloo_m2n

gloo_m2n.install()
# Linear layers keep their weights as a GPU's do, instead of packed for a CPU's kernels.
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", linear)


class M2n(gloo_m2n.GlooM2n):
    """``nccl_m2n`` that needs nothing installed."""

    @classmethod
    def find_lacking(cls) -> str | None:
        """Return that nothing is lacking."""
        return None
