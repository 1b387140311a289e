"""Students of many families against transformers: log-probabilities, what leaves the actor, sampling without vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gkd.actor.collate import collate
from gkd.actor.loading import load
from gkd.actor.model import Student, named_tensors
from gkd.actor.pretrained import write_config, write_pretrained, write_weights
from gkd.config import Lora, Rollout
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec
from gkd.inference.hf import HFSampler
from gkd.types import Sample, Sampling, ScoredSample
from gkd.weights.file_names import FileNames
from gkd.weights.transfer import Bucket
from tests.data.models import word_tokenizer
from tests.families import EOS, FAMILIES, N_TOKENS, SHAPE, STATEFUL, make
from tests.vllm.inference.test_engines import requests, run, worst_difference
from tests.weights.received import load_in_buckets

PADDED = {"falcon", "llama4", "doge"}
PARTLY = {*STATEFUL, "gpt_oss", "gemma2"}
"""Some of their layers are given rows, for a state, soft caps or sinks."""
DESCRIBED = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS)


def student_of(family: str, path: Path, lora: Lora | None = None) -> tuple[Student, PreTrainedModel]:
    """A student of a family as a run loads it, and the model whose files it was loaded from."""
    model = make(family, seed=0)
    model.save_pretrained(path)
    return load(path, lora=lora), model


def samples() -> list[ScoredSample]:
    """Of different lengths, prompt and response."""
    rng = np.random.default_rng(0)
    scored = []
    for request in requests(Sampling(12), n=5):
        ids = rng.integers(3, N_TOKENS, rng.integers(1, 12)).astype(np.int32)
        scored.append(ScoredSample(Sample.single_turn(request, ids, np.zeros(len(ids), np.float32), 0, "stop")))
    return scored


@torch.no_grad()
def logprobs(model: PreTrainedModel, scored: ScoredSample) -> Tensor:
    """transformers' own of one sample by itself, at the response's positions, [R, V]."""
    sample = scored.sample
    ids = sample.token_ids.astype(np.int64)
    return model(torch.from_numpy(ids)[None]).logits[0, -len(sample.sampled_ids) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_students_logprobs_and_files_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Scaled and capped logits, experts, windows, states: whatever the family does, in one micro-batch of five."""
    student, model = student_of(family, tmp_path)
    assert student.is_packed == (family not in PADDED)
    assert student.takes_rows == (family in PADDED | PARTLY)
    assert student.training
    batch = samples()
    micro = collate(batch, None, [1.0] * 5, [0.0] * 5)
    with torch.no_grad():
        own = student(micro, lambda hidden, head: head(hidden).log_softmax(-1))
    torch.testing.assert_close(own, torch.cat([logprobs(model, scored) for scored in batch]), rtol=0, atol=1e-4)
    files, sent = load_file(tmp_path / "model.safetensors"), dict(student.file_tensors(torch.float32))
    assert sent.keys() == files.keys()
    assert all(torch.equal(sent[name], value) for name, value in files.items())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_neox", "gemma2"])
def test_what_is_written_is_what_was_read(family: str, tmp_path: Path) -> None:
    student, _ = student_of(family, tmp_path / "read")
    read = load_file(tmp_path / "read" / "model.safetensors")
    half = sum(value.nbytes for value in read.values()) // 2
    for name, shard_bytes in (("one", 1 << 30), ("several", half)):
        directory = tmp_path / name
        directory.mkdir()
        write_config(str(tmp_path / "read"), torch.float32, directory)
        write_weights(student.file_tensors(torch.float32), directory, shard_bytes)
        files = list(directory.glob("*.safetensors"))
        assert len(files) == 1 if name == "one" else len(files) >= 2
        written = {key: value for file in files for key, value in load_file(file).items()}
        assert read.keys() == written.keys()
        assert all(torch.equal(written[key], value) for key, value in read.items())
        again, model = AutoModelForCausalLM.from_pretrained(directory).state_dict(), student.lm.state_dict()
        assert again.keys() == model.keys() and all(torch.equal(again[key], value) for key, value in model.items())


@pytest.mark.parametrize("lora", [None, Lora(r=2, target_modules=["o_proj"])])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_what_the_model_keeps_beside_its_parameters_is_not_rounded(
    family: str, lora: Lora | None, tmp_path: Path
) -> None:
    """Of biases by which experts are chosen, bfloat16 would make these one number."""
    model = make(family, seed=0)
    biases = {name: value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for value in biases.values():
        value.copy_(10 + 0.01 * torch.arange(len(value)))
    model.save_pretrained(tmp_path)
    files, sent = (
        load_file(tmp_path / "model.safetensors"),
        dict(load(tmp_path, lora=lora).file_tensors(torch.bfloat16)),
    )
    kept = {name for name in files if "e_score_correction_bias" in name}
    assert len(kept) == len(biases) > 0 and all(torch.equal(sent[name], files[name]) for name in kept)
    assert {value.dtype for name, value in sent.items() if name not in kept} == {torch.bfloat16}


def test_an_adapter_reaches_the_files_names(tmp_path: Path) -> None:
    student, _ = student_of("mixtral", tmp_path, Lora(r=2))
    with torch.no_grad():
        for name, parameter in student.lm.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    files, sent = load_file(tmp_path / "model.safetensors"), dict(student.file_tensors(torch.float32))
    assert {name: t.shape for name, t in sent.items()} == {name: t.shape for name, t in files.items()}
    changed = {name for name, value in files.items() if not torch.equal(sent[name], value)}
    assert changed == {name for name in files if "self_attn" in name}
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in files


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "llama4", "phimoe", "mixtral", "gpt_oss", "lfm2"])
def test_an_adapter_of_all_linear_layers_is_trained_and_written_as_peft_reads_it(family: str, tmp_path: Path) -> None:
    """Neither of experts, by whose names peft takes those of some dense layers, nor of routers that are no product."""
    base, out, lora = tmp_path / "base", tmp_path / "out", Lora(r=2)
    student, _ = student_of(family, base, lora)
    word_tokenizer().save_pretrained(base)
    torch.manual_seed(1)
    for name, parameter in student.lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    micro = collate(samples(), None, [1.0] * 5, [0.0] * 5)
    student(micro, lambda hidden, head: head(hidden).square().mean()).backward()
    assert all(parameter.grad is not None for parameter in student.lm.parameters() if parameter.requires_grad)
    write_pretrained(student, str(base), lora, torch.float32, out, writes=True)
    merged, alone = (AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager") for path in (out, base))
    alone = PeftModel.from_pretrained(alone, out / "adapter").eval()
    for scored in samples():
        torch.testing.assert_close(logprobs(merged, scored), logprobs(alone, scored), rtol=0, atol=1e-4)


def test_tensors_that_are_converted_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors one at a time give something else than all at once, a layer's go together."""

    def joined(_: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        merged = dict(state)
        for layer in {name.rpartition(".")[0] for name in state if name.endswith((".q", ".k"))}:
            merged[f"{layer}.qk"] = torch.cat([merged.pop(f"{layer}.q"), merged.pop(f"{layer}.k")])
        return merged

    monkeypatch.setattr("gkd.weights.file_names.revert_weight_conversion", joined)
    names = ["embed", "layers.0.q", "layers.0.k", "layers.0.o", "layers.1.q", "layers.1.k", "layers.1.o"]
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    files = FileNames(make("llama", 0), dict.fromkeys(names, (2,)))
    read: list[str] = []

    def reading() -> object:
        for name in names:
            read.append(name)
            yield name, tensors[name]

    converted = {}
    for name, tensor in files.convert(reading()):
        converted[name] = tensor
        if name == "layers.0.qk":
            assert read == names[:4]
    assert converted.keys() == {"embed", "layers.0.qk", "layers.0.o", "layers.1.qk", "layers.1.o"}
    assert torch.equal(converted["layers.1.qk"], torch.tensor([4.0, 4.0, 5.0, 5.0]))


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "falcon_h1", "mamba"])
def test_sampling_with_transformers_follows_the_actor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, model = student_of(family, tmp_path)
    engine = HFSampler(EngineSpec("rollout", str(tmp_path), DESCRIBED, Rollout(max_num_seqs=64), "cpu", "float32"))
    sample_requests, convert = requests(Sampling(8), n=4), engine._convert
    converted: list[int] = []

    def converts(bucket: Bucket, state: dict[str, Tensor]) -> dict[str, Tensor]:
        converted.append(bucket.version)
        return convert(bucket, state)

    monkeypatch.setattr(engine, "_convert", converts)
    for version in (0, 1, 2):
        if version:
            model = make(family, seed=version)
            student.lm.load_state_dict(model.state_dict())
            load_in_buckets(engine, student.file_tensors(torch.float32), version)
        assert worst_difference(model, sample_requests, run(engine, sample_requests)) < 2e-4
    assert converted == ([1, 2] if family == "mixtral" else [1])  # its experts are one tensor in the model
    sent = dict(student.file_tensors(torch.float32))
    with pytest.raises(RuntimeError, match=r"version 3: strange .*\b1 tensors"):
        engine.load_weights(Bucket(3, 0, True), sent | {"strange": torch.zeros(1)})
    name = next(name for name in sent if "embed" not in name)
    with pytest.raises(RuntimeError, match=r"version 4: .* missing .*\b1 tensors"):
        engine.load_weights(Bucket(4, 0, True), {other: t for other, t in sent.items() if other != name})


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_are_those_that_files_get_in_their_order(family: str) -> None:
    lm = make(family, 0)
    tensors = dict(named_tensors(lm))
    files = FileNames(lm, {name: tuple(value.shape) for name, value in tensors.items()})
    converted = list(files.convert(iter(tensors.items())))
    assert [(name, tuple(t.shape)) for name, t in converted] == [
        its for c in files.conversions for its in c.shapes.items()
    ]
    by_name = dict(converted)
    for conversion in files.conversions:
        if conversion.renames:
            assert by_name[next(iter(conversion.shapes))] is tensors[conversion.names[0]]
