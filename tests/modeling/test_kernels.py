"""Layers with a state where kernels for them are installed, which a CPU cannot run, and where they are not."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5

from gkd.errors import ConfigError
from gkd.modeling.attention import IN_ROWS, NAME
from gkd.modeling.backbone import pack_or_pad, use_padded_rows
from gkd.modeling.kernels import list_missing_packages, use_reference_code
from tests.families import make

RULE = "torch_chunk_gated_delta_rule"
GPU = torch.device("cuda")


@pytest.fixture
def reference() -> Callable[..., Any]:
    """What transformers computes itself."""
    function: Callable[..., Any] = inspect.unwrap(getattr(modeling_qwen3_5, RULE))
    return function


def wrap(monkeypatch: pytest.MonkeyPatch, reference: Callable[..., Any], package: str) -> None:
    """Have transformers find, or not find, a package with kernels, as it does when it is imported."""
    decorate = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", package)
    monkeypatch.setattr(modeling_qwen3_5, RULE, decorate(reference))


@pytest.fixture
def kernels_for_gpus(monkeypatch: pytest.MonkeyPatch, reference: Callable[..., Any]) -> None:
    """Have transformers find kernels that a CPU cannot run."""

    def kernel(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.is_cpu:
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        return reference(query, *args, **kwargs)

    package = ModuleType("kernels_for_gpus")
    package.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=kernel))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    wrap(monkeypatch, reference, package.__name__)


def hybrid() -> PreTrainedModel:
    lm = make("qwen3_5", 0)
    lm.set_attn_implementation(NAME)
    return lm


@pytest.mark.usefixtures("kernels_for_gpus")
def test_kernels_that_a_cpu_cannot_run_do_not_cost_packing() -> None:
    """A model is read on the CPU, whatever it is for."""
    lm = hybrid()
    pack_or_pad(lm, "model.path", GPU)
    assert lm.config._attn_implementation == IN_ROWS
    with use_padded_rows(lm), pytest.raises(ValueError, match="Triton"):  # it has them, for where it is going
        lm(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.usefixtures("kernels_for_gpus")
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_model_that_stays_where_its_kernels_cannot_run_is_refused_at_once(device: torch.device | None) -> None:
    with pytest.raises(ConfigError, match="Triton"):
        pack_or_pad(hybrid(), "model.path", device)


def test_two_uses_of_reference_code_that_overlap_leave_nothing_behind() -> None:
    before = hub_kernels.is_torchdynamo_exporting
    first, second = use_reference_code(), use_reference_code()
    first.__enter__()
    second.__enter__()
    assert hub_kernels.is_torchdynamo_exporting()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert hub_kernels.is_torchdynamo_exporting is before and not before()


@pytest.mark.parametrize(("device", "n_lines"), [(GPU, 1), (None, 0)])
def test_packages_that_a_gpu_lacks_are_named(
    device: torch.device | None,
    n_lines: int,
    monkeypatch: pytest.MonkeyPatch,
    reference: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrap(monkeypatch, reference, "no_such_kernels")
    for _ in range(2):  # of a second model as well
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            pack_or_pad(hybrid(), "model.path=DIR", device)
        lines = [record.getMessage() for record in caplog.records if "no_such_kernels" in record.getMessage()]
        assert len(lines) == n_lines
        for line in lines:
            assert line.startswith("model.path=DIR:") and "chunk_gated_delta_rule" in line
            assert line.count("no_such_kernels") == 1 and {"pip", "install", "no_such_kernels"} <= set(line.split())


def test_other_messages_of_transformers_pass(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(hub_kernels.__name__)
    with list_missing_packages() as missing, caplog.at_level(logging.WARNING):
        logger.warning("another message")
        logger.warning("`one` is falling back to its code because `a-package` is not installed. More.")
        logger.warning("`two` is falling back to its code because `a-package` is not installed. More.")
    assert missing == {"one": "a-package", "two": "a-package"}
    assert [record.getMessage() for record in caplog.records] == ["another message"]
