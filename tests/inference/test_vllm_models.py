"""What vLLM cannot run on a CPU, by the model's configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from gkd.config.compose import compose
from gkd.data.model_info import ModelInfo
from gkd.driver.inputs.models import require_usable
from gkd.errors import ConfigError
from gkd.inference.vllm_models import (
    STUDENT_REMEDY,
    find_cpu_obstacle,
    find_obstacle,
    find_obstacle_here,
    require_vllm_runs,
)
from tests.families import FAMILIES, STATEFUL, config_of

NOT_AT_ALL = {"doge"}
NOT_HERE = {"mamba", "qwen3_5", "minimax_m2", "qwen3_next", "lfm2", "phimoe"}
SMALL = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_run_are_let_through(family: str, tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    obstacle, never = find_cpu_obstacle(config), find_obstacle(config)
    assert (obstacle is None) == (family not in NOT_HERE), obstacle
    assert (never is None) == (family not in NOT_AT_ALL), never
    assert ModelInfo.read(str(tmp_path), "model.path").stateful == (family in STATEFUL)


def test_a_state_has_no_heads_to_be_refused_for() -> None:
    assert find_cpu_obstacle(AutoConfig.for_model("mamba2", hidden_size=48, head_dim=24, num_heads=4)) is None


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("llama", {}, r"no attention with heads of 24, only of 32, 64,"),
        ("qwen3", {"head_dim": 40}, r"no attention with heads of 40,"),
        ("gpt2", {"n_embd": 48, "n_head": 2}, r"no attention with heads of 24,"),
        ("falcon_h1", {"head_dim": 16}, r"no attention with heads of 16,"),
        ("mamba", {}, r"vLLM cannot run a mamba model: it has no selective scan"),
        ("lfm2", {}, r"lfm2 model: it gives other log-probabilities than transformers on a CPU"),
        ("qwen3_5_text", {"head_dim": 32}, r"qwen3_5_text model only beside torchvision"),
        ("gemma3", {}, r"gemma3 model only beside torchvision"),
        ("deepseek_v3", {"kv_lora_rank": 64, "qk_rope_head_dim": 16}, r"latent vector of 80, only of 576"),
    ],
)
def test_what_has_no_kernel_is_named(
    kind: str, changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.inference.vllm_models.find_spec", lambda _: None)
    monkeypatch.setattr("gkd.inference.vllm_models.installed_device", lambda: "cpu")
    obstacle = find_obstacle_here(AutoConfig.for_model(kind, **SMALL | changed))
    assert obstacle is not None
    assert __import__("re").search(reason, obstacle), obstacle


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_families_that_vllm_lacks_are_refused_on_every_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkd.inference.vllm_models.installed_device", lambda: device)
    for kind, reason in (("codegen", "it has no CodeGenForCausalLM"), ("doge", "leaves out the mask")):
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=rf"^model.path=.* {kind} model: .*{reason}.*; rollout.engine=hf samples"):
            require_vllm_runs(str(tmp_path), "model.path", STUDENT_REMEDY)
    AutoConfig.for_model("helium", head_dim=128).save_pretrained(tmp_path)  # which vLLM runs by transformers' layers
    require_vllm_runs(str(tmp_path), "model.path", STUDENT_REMEDY)


def test_each_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **SMALL).save_pretrained(tmp_path)
    path, config = str(tmp_path), compose(["+recipe=grpo"])
    with pytest.raises(ConfigError, match=r"^model.path=.* heads of 24, .*; rollout.engine=hf samples"):
        require_usable(config, path, {})
    scored = ["+recipe=on_policy_distill", "algorithm.kl.coef=0.1", "teacher.engine=vllm", "reference.engine=vllm"]
    config = compose([*scored, "rollout.engine=hf"])
    require_usable(config, path, {})
    with pytest.raises(ConfigError, match=r"^reference.model.path=.* heads of 24, .*; reference.engine=torch scores"):
        require_usable(config, path, {"reference": path})
    with pytest.raises(ConfigError, match=r"^teacher.models.math=.* heads of 24, .*; teacher.engine=torch scores"):
        require_usable(config, path, {"teacher:math": path})


def test_a_model_that_is_computed_otherwise_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of("apertus").save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="gkd"):
        require_vllm_runs(str(tmp_path), "model.path", STUDENT_REMEDY)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "gkd"]
    assert warning.startswith(f"model.path={tmp_path}: ") and "apertus" in warning and "0.004 nats" in warning
