"""Engines over the GPUs that there are, and what auto makes of a model's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gkd.cli.evaluate import compose_evaluation
from gkd.config import Config
from gkd.errors import ConfigError
from gkd.evaluation.modes import with_engines

SIZES = {"1.5b": (1536, 8960, 28, 12), "7b": (3584, 18944, 28, 28), "32b": (5120, 27648, 64, 40)}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Directories with the configuration of Qwen2.5's sizes."""

    def make(size: str) -> tuple[str, str]:
        hidden, width, layers, heads = SIZES[size]
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
        config |= {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
        config |= {"num_attention_heads": heads, "num_key_value_heads": 4, "max_position_embeddings": 32768}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return "base", str(tmp_path)

    return make


def settings(*overrides: str) -> Config:
    one = "evaluate.sets.a={files:[a.jsonl],answer_key:answer}"
    return compose_evaluation(
        [
            "models.base=none",
            one,
            "plan.memory_gb=11.6",
            "model.dtype=bfloat16",
            "rollout.gpu_memory_utilization=0.92",
            *overrides,
        ]
    )


def layout(config: Config) -> tuple[int, int, int]:
    pool = config.rollout
    return pool.n_engines, pool.tensor_parallel_size, pool.nnodes


@pytest.mark.parametrize(("size", "engines"), [("1.5b", (8, 1, 1)), ("7b", (4, 2, 1)), ("32b", (1, 8, 1))])
def test_auto_takes_the_fewest_gpus_that_a_model_fits_on(model: Any, size: str, engines: tuple[int, int, int]) -> None:
    """On eight GPUs of 12 GB, as the system that this replaces had them."""
    assert layout(with_engines(settings(), [8], model(size), on_gpus=True)) == engines


def test_a_model_that_fits_nowhere_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"models\.base: .*\b2 GPUs of 11\.6 GB .*\b2\d\.\d GB short"):
        with_engines(settings(), [2], model("32b"), on_gpus=True)
    assert layout(with_engines(settings("plan.check=false"), [2], model("32b"), on_gpus=True)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("overrides", "nodes", "engines"),
    [
        ([], [8], (8, 1, 1)),
        ([], [8, 8, 2], (16, 1, 2)),
        (["rollout.tensor_parallel_size=2"], [5], (2, 2, 1)),
        (["evaluate.mode=single"], [8], (1, 1, 1)),
        (["evaluate.mode=data_parallel", "rollout.tensor_parallel_size=4"], [8], (2, 4, 1)),
        (["evaluate.mode=sharded"], [8], (1, 4, 1)),  # of 28 heads and 4 for keys
        (["rollout.gpus=2-3"], [8], (2, 1, 1)),
        (["rollout.gpus=2-5", "evaluate.mode=single"], [8], (1, 1, 1)),
        (["rollout.engine=hf"], [4], (4, 1, 1)),
    ],
)
def test_modes(model: Any, overrides: list[str], nodes: list[int], engines: tuple[int, int, int]) -> None:
    config = with_engines(settings(*overrides), nodes, model("7b"), on_gpus=False)
    assert layout(config) == engines
    if config.rollout.gpus is not None:
        assert config.rollout.gpus == [2, 3][: config.rollout.n_gpus_per_node]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=hf", "evaluate.mode=sharded"], "evaluate.mode=sharded: rollout.engine=hf"),
        (
            ["rollout.tensor_parallel_size=8", "evaluate.mode=data_parallel"],
            "rollout.tensor_parallel_size=8: .*4",
        ),
    ],
)
def test_what_cannot_be(model: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_engines(settings(*overrides), [4], model("7b"), on_gpus=False)
