"""What a run says before it loads anything."""

from __future__ import annotations

from gkd.config import load
from gkd.run import step_text


def test_a_step_and_what_memory_depends_on() -> None:
    config = load(
        {
            "trainer": {"batch_size": 64},
            "rollout": {"n": 8, "max_response_length": 96},
            "data": {"max_prompt_length": 896},
            "actor": {"mini_batch_size": 200, "update_epochs": 2, "lora": {"r": 8, "quantize": "nf4"}},
        }
    )
    assert step_text(config) == (
        "a step: 64 prompts x 8 = 512 samples, 6 updates; prompts up to 896 and responses up to 96 tokens; "
        "micro-batches of 8,192 tokens; LoRA r=8 over nf4"
    )
    plain = step_text(load({"actor": {"gradient_checkpointing": True, "offload_optimizer": True}}))
    assert "64 samples, 1 update;" in plain
    assert plain.endswith("gradient checkpointing; optimizer in the host's memory")
