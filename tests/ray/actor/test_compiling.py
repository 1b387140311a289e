"""Compiled layers against the same ones as they are: captured and differentiated as a graph, without a C compiler.

What inductor makes of the graphs, and several ranks, are in test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from gkd.actor.compiling import Compilation, compile_setting, compile_student, pack_size
from gkd.actor.loading import load
from gkd.actor.model import Student
from gkd.config import Algorithm, Lora, Rollout
from gkd.errors import ConfigError
from gkd.losses.objective import objective
from gkd.losses.outcomes import Kernels, outcomes, use_kernels
from gkd.modeling import compiling
from gkd.modeling.attention import NAME
from gkd.modeling.compiling import is_compile_failure
from tests.actor import models
from tests.families import make
from tests.losses.test_micro_batch import micro_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUDGET = 400


@pytest.fixture(autouse=True)
def _captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of engines that ran in this process before
    with config.patch(disable=False):
        yield
    torch.compiler.reset()


def loss_and_gradients(student: Student, seed: int, n: int) -> tuple[Tensor, dict[str, Tensor]]:
    micro = micro_batch(models.scored(n, seed=seed))
    student.zero_grad()
    loss, _ = student(micro, objective(micro, Algorithm(), Rollout(n=2), 100))
    with ThreadPoolExecutor(1) as thread:  # not the one that computed forward, as on a GPU
        thread.submit(loss.backward).result()
    return loss.detach(), {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def compare(plain: Student, compiled: Student, seed: int, n: int = 4) -> None:
    expected, slopes = loss_and_gradients(plain, seed, n)
    loss, gradients = loss_and_gradients(compiled, seed, n)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == slopes.keys()
    for name, value in slopes.items():  # sums of float32 in another order: how far they are apart is the processor's
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=3e-5 * float(value.abs().max()), msg=name)


def students(model: object, path: Path, **settings: object) -> tuple[Student, Student]:
    """One as it is, and one with compiled layers."""
    model.save_pretrained(path)
    plain, compiled = load(path, **settings), load(path, **settings)
    compiled.load_state_dict(plain.state_dict())  # adapters begin at random
    compiled.compilation = compile_student(compiled.lm, True, BUDGET, CPU)
    assert compiled.compilation == Compilation(BUDGET, dynamic=not compiled.is_packed, strict=True)
    return plain, compiled


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"gradient_checkpointing": True}),
        ("qwen2 tied", {"lora": Lora(r=4)}),
    ],
)
def test_packs_of_any_lengths_share_what_is_compiled(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    plain, compiled = students(models.make(family), tmp_path, **settings)
    for name, parameter in [*plain.named_parameters(), *compiled.named_parameters()]:
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    compare(plain, compiled, seed=0)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for seed in (1, 2):
        compare(plain, compiled, seed)
    assert counters["stats"]["unique_graphs"] == graphs  # other lengths, the same shapes


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_families_of_gemma_packed_and_padded(family: str, tmp_path: Path) -> None:
    plain, compiled = students(make(family, seed=0), tmp_path)
    assert compiled.is_packed == (family == "gemma")
    for seed in (0, 1):
        compare(plain, compiled, seed)
    assert counters["stats"]["unique_graphs"] > 0


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_packs_have_few_sizes(n_tokens: int, budget: int) -> None:
    size = pack_size(n_tokens, budget)
    assert n_tokens <= size < n_tokens + budget / 4 + 1
    assert n_tokens > budget or size <= budget
    if budget >= 4:
        assert len({pack_size(n, budget) for n in range(1, budget + 1)}) == 4


def test_what_a_pack_is_padded_with_is_in_no_sequence_and_no_row(tmp_path: Path) -> None:
    models.make("llama").save_pretrained(tmp_path)
    student, micro = load(tmp_path), micro_batch(models.scored(4))
    n, longest = len(micro.sequences), micro.sequences.max_seqlen
    for size in (n, n + 1, n + longest, n + 3 * longest + 2):
        padded = replace(micro, sequences=micro.sequences.pad(size))  # how it is laid out: tests/modeling
        with torch.no_grad():
            torch.testing.assert_close(student.compute_hidden(padded)[:n], student.compute_hidden(micro))


def packed(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation(NAME)
    return model


def test_auto_is_gpus_and_dense_models_that_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_obstacle", lambda device: None)  # no GPU is needed to know
    lm = packed(models.make("llama"))
    assert compile_student(lm, "auto", BUDGET, CUDA) is None
    monkeypatch.setattr(compiling, "LEAST_PARAMETERS", 1)
    assert compile_student(lm, "auto", BUDGET, CPU) is None
    assert compile_student(models.make("llama"), "auto", BUDGET, CUDA) is None
    assert compile_student(packed(make("mixtral", 0)), "auto", BUDGET, CUDA) is None
    assert compile_student(packed(make("qwen3_moe", 0)), "auto", BUDGET, CUDA) is None
    assert compile_student(lm, False, BUDGET, CUDA) is None
    assert compile_student(lm, "auto", BUDGET, CUDA) == Compilation(BUDGET, dynamic=False, strict=False)


def test_a_machine_that_cannot_compile_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", lambda graph, inputs: 1 / 0)
    monkeypatch.setattr(compiling, "LEAST_PARAMETERS", 1)
    with pytest.raises(ConfigError, match=r"^actor\.compile=true: .*division by zero.*; actor\.compile="):
        compile_student(models.make("llama"), True, BUDGET, CPU)
    reason = compiling.find_obstacle(CPU)
    monkeypatch.setattr(compiling, "find_obstacle", lambda device: reason)
    assert compile_student(packed(models.make("llama")), "auto", BUDGET, CUDA) is None
    assert "(actor.compile=auto): torch could" in caplog.messages[-1]


def test_a_layer_that_cannot_be_compiled_is_a_failure_or_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.make("llama")
    plain, _ = students(model, tmp_path)
    monkeypatch.setattr(compiling, "BACKEND", lambda graph, inputs: 1 / 0)
    monkeypatch.setattr(compiling, "LEAST_PARAMETERS", 1)
    monkeypatch.setattr(compiling, "find_obstacle", lambda device: None)
    _, strict = students(model, tmp_path)
    with pytest.raises(RuntimeError) as failure:
        loss_and_gradients(strict, 0, 4)
    assert is_compile_failure(failure.value)
    assert not is_compile_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    text = compile_setting("auto").failure_text(failure.value)
    assert text.startswith("actor.compile=auto: ") and "ZeroDivisionError" in text
    torch.compiler.reset()
    loose = load(tmp_path)
    loose.compilation = compile_student(loose.lm, "auto", BUDGET, CUDA)
    compare(plain, loose, seed=0)
    (message,) = [message for message in caplog.messages if "ZeroDivisionError" in message]
    assert "(actor.compile=auto): " in message


def test_what_the_loss_compiles_backward_does_so_by_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is in a thread of autograd's, where torch's settings may be others."""
    monkeypatch.setattr(compiling, "BACKEND", lambda graph, inputs: 1 / 0)
    ids, slopes = torch.tensor([[1], [3]]), []
    for context in (nullcontext(), use_kernels(Kernels.compile())):
        logits = torch.arange(8.0).view(2, 4).requires_grad_()
        with compiling.allow_compiling(strict=False), context, ThreadPoolExecutor(1) as thread:
            loss = outcomes(logits, ids).others.sum()
            slopes += thread.submit(torch.autograd.grad, loss, logits).result()
    torch.testing.assert_close(*slopes)


def test_a_model_says_which_layers_are_alike() -> None:
    lm = AutoModelForCausalLM.from_config(models.make("llama").config)
    lm._no_split_modules = None
    with pytest.raises(ConfigError, match="are alike"):
        compile_student(lm, True, BUDGET, CPU)
