"""The receiving end of an adapter that is sent alone: vLLM's LoRA, one adapter, replaced in place."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from gkd.weights.transfer import Bucket

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from gkd.config import Lora
    from gkd.weights.vllm_backend import CachePolicy

NAME, NUMBER = "student", 1


def arguments(lora: Lora, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return arguments of vLLM's engine: room for one adapter, of the smallest of ``ranks`` that holds it."""
    assert lora.r is not None, "an adapter has a rank"
    rank = next(rank for rank in ranks if rank >= lora.r)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}


class AdapterLoader:
    """Collects the buckets of an adapter, and has ``llm`` take it in place of the one before.

    vLLM reads adapters from files in peft's format: they are written to a directory of this machine.
    """

    def __init__(self, llm: LLM, lora: Lora) -> None:
        self._llm, self._lora = llm, lora
        self._tensors: dict[str, Tensor] = {}
        self.request: LoRARequest | None = None
        """What requests name the adapter by; None before the first push, as a new one changes nothing."""

    def load(self, bucket: Bucket, tensors: dict[str, Tensor], running: CachePolicy) -> None:
        """Take the next bucket while the engine computes nothing; with the last one the adapter serves.

        What ``running`` requests have cached is forgotten or kept, as by :func:`gkd.weights.vllm_backend.load`.
        Raises RuntimeError where vLLM does not take the adapter, or requests began without one, which end so (in
        flight, a first push comes before any): do not sample then.
        """
        from vllm.lora.request import LoRARequest

        from gkd.weights.vllm_backend import reset_cache

        if self.request is None and self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("requests began without an adapter, and would go on without one under other weights")
        if bucket.number == 0:
            self._tensors = {}
        self._tensors |= tensors
        if not bucket.last:
            return
        # Only for as long as vLLM reads it, as workers are ended by SIGKILL.
        with TemporaryDirectory(prefix="gkd-adapter-") as directory:
            self._write(Path(directory))
            if not self._llm.llm_engine.add_lora(LoRARequest(NAME, NUMBER, directory, load_inplace=True)):
                raise RuntimeError(f"vLLM did not take the adapter of weights version {bucket.version}")
        self._llm.llm_engine.set_weight_version(str(bucket.version))
        reset_cache(self._llm, running)
        self.request = LoRARequest(NAME, NUMBER, directory)
        self._tensors = {}

    def _write(self, directory: Path) -> None:
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in self._tensors}
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._lora.r,
            "lora_alpha": self._lora.lora_alpha,
            "target_modules": sorted(layers),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in self._tensors.items()},
                  directory / "adapter_model.safetensors")  # fmt: skip
