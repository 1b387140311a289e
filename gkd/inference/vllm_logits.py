"""What is done to the logits of an engine of vLLM's: a temperature for scores, and padded rows that stay impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes to the logits of every request in an engine: ids from ``rows`` on are impossible, the rest is
    divided by ``temperature``.
    """

    temperature: float = 1.0
    rows: int | None = None

    def put_on(self, model: Any) -> None:
        """Have ``model`` change its logits so, no more as before; vLLM's ``apply_model`` does it in every process."""
        if not isinstance(model.compute_logits, _ShapedLogits):
            model.compute_logits = _ShapedLogits(model.compute_logits)
        model.compute_logits.shape = self


class _ShapedLogits:
    """Stands in for a model's ``compute_logits``."""

    def __init__(self, compute_logits: Any) -> None:
        self.compute_logits, self.shape = compute_logits, Shape()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = self.compute_logits(*args, **kwargs)
        if logits is None:  # not the rank that has them
            return None
        if self.shape.rows is not None and self.shape.rows < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.shape.rows :] = float("-inf")
        # In float32, as vLLM's own log-softmax: bfloat16 logits would be rounded a second time.
        return logits if self.shape.temperature == 1.0 else logits.float() / self.shape.temperature
