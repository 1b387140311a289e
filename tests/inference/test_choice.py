"""Which engine scores where none is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator
from transformers import AutoConfig

from gkd.config.compose import compose
from gkd.config.groups import Teacher
from gkd.data.model_info import ModelInfo
from gkd.driver.inputs.models import require_usable, with_scoring_engines
from gkd.errors import ConfigError, RunFailed
from gkd.inference.engine import EngineSpec
from gkd.inference.torch_scorer import TorchScorer
from gkd.inference.vllm_models import scoring_engine
from gkd.inference.vllm_scorer import VLLMScorer, scoring_arguments
from tests.families import config_of

ENGINES = {
    "llama": "torch", "qwen2 tied": "torch", "qwen3": "torch", "mistral": "torch", "gpt2": "torch",
    "qwen3_moe": "vllm", "mixtral": "vllm", "gemma2": "vllm", "falcon_h1": "vllm",
    "mamba": "torch", "minimax_m2": "torch",  # which vLLM cannot run on a CPU
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gkd.inference.vllm_models.installed_device", lambda: "cpu")


@pytest.mark.parametrize(("family", "engine"), ENGINES.items())
def test_auto_follows_from_the_model(family: str, engine: str, tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    assert scoring_engine(Teacher(), str(tmp_path)) == engine
    assert scoring_engine(Teacher(tensor_parallel_size=2, n_gpus_per_node=2), str(tmp_path)) == "vllm"
    for named in ("torch", "vllm"):
        assert scoring_engine(Teacher(engine=named), str(tmp_path)) == named


def test_heads_that_vllm_lacks_and_stored_quantized_weights(tmp_path: Path) -> None:
    small = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    AutoConfig.for_model("gemma2", head_dim=24, **small).save_pretrained(tmp_path)
    assert scoring_engine(Teacher(), str(tmp_path)) == "torch"  # slower than vLLM, which has no such heads
    AutoConfig.for_model("llama", head_dim=32, quantization_config={"quant_method": "fp8"}, **small).save_pretrained(
        tmp_path
    )
    assert scoring_engine(Teacher(), str(tmp_path)) == "vllm"


def test_a_run_has_one_engine_for_all_its_teachers(tmp_path: Path) -> None:
    paths = {}
    for family in ("llama", "qwen3_moe"):
        config_of(family).save_pretrained(tmp_path / family)
        paths[family] = str(tmp_path / family)
    config = compose(["+recipe=on_policy_distill", "algorithm.kl.coef=0.1"])
    scorers = {
        "torch": {"teacher": paths["llama"]},
        "vllm": {"teacher:a": paths["qwen3_moe"], "teacher:b": paths["qwen3_moe"]},
    }
    for engine, models in scorers.items():
        assert with_scoring_engines(config, models).teacher.engine == engine
    mixed = {"teacher:a": paths["qwen3_moe"], "teacher:b": paths["llama"], "reference": paths["qwen3_moe"]}
    decided = with_scoring_engines(config, mixed)
    assert (decided.teacher.engine, decided.reference.engine) == ("torch", "vllm")
    named = compose(["+recipe=on_policy_distill", "teacher.engine=vllm"])
    assert with_scoring_engines(named, scorers["torch"]).teacher.engine == "vllm"


def test_an_external_teachers_engine_is_not_chosen_here(tmp_path: Path) -> None:
    """Its model may be here too, for its tokenizer; what its own machine runs it with is settled there."""
    config_of("qwen3_moe").save_pretrained(tmp_path)
    scorers = {"teacher": str(tmp_path)}
    own = ["model.path=m", f"teacher.model.path={tmp_path}", "data.train_files=[x]", "data.val_files=[x]"]
    config = compose([*own, "teacher.server_ip=127.0.0.1", "teacher.quantization=fp9", "rollout.engine=hf"])
    assert with_scoring_engines(config, scorers).teacher.engine == "auto"
    require_usable(config, str(tmp_path), scorers)


def test_a_method_of_quantization_is_vllms(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    assert scoring_engine(Teacher(quantization="fp8"), str(tmp_path)) == "vllm"
    assert Teacher(quantization="fp8").engine_class is VLLMScorer
    with pytest.raises(ValidationError, match=r"quantization=fp8: engine=torch\b"):
        Teacher(engine="torch", quantization="fp8")
    spec = EngineSpec(
        "teacher", str(tmp_path), ModelInfo(96, 128, [1], 90), Teacher(quantization="fp8_per_block"), "cuda", "bfloat16"
    )
    assert scoring_arguments(spec)["quantization"] == "fp8_per_block"
    config = compose(["+recipe=on_policy_distill", "teacher.quantization=fp9"])
    with pytest.raises(ConfigError, match=r"^teacher\.quantization=fp9: .*mean fp8\?"):
        require_usable(config, str(tmp_path), {"teacher": str(tmp_path)})
    require_usable(
        compose(["+recipe=on_policy_distill", "teacher.quantization=fp8"]), str(tmp_path), {"teacher": str(tmp_path)}
    )


def test_an_engine_that_does_not_start_names_the_settings_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM refuses itself is pydantic's to raise."""
    why = "torch.float32 is not supported for fp8"

    class Refusing(BaseModel):
        @model_validator(mode="after")
        def _refuse(self) -> Refusing:
            raise ValueError(why)

    monkeypatch.setattr("gkd.inference.vllm_scorer.start_llm", lambda *_: Refusing())
    spec = EngineSpec("teacher", "path", ModelInfo(96, 128, [1], 90), Teacher(quantization="fp8"), "cpu", "float32")
    settings = r"teacher\.quantization=fp8 .*float32 \(model\.dtype\)"
    with pytest.raises(RunFailed, match=rf"{settings}: {re.escape(why)}$"):
        VLLMScorer(spec)


def test_before_models_are_known_the_width_of_an_engine_decides() -> None:
    assert Teacher().engine_class is TorchScorer
    assert Teacher(tensor_parallel_size=2, n_gpus_per_node=2).engine_class is VLLMScorer
