"""A run that has finished and is started again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gkd.config import load
from gkd.driver.checkpoints.resume import explain_finished
from gkd.errors import ConfigError
from gkd.recipes.sort_digits.sorting import make_tokenizer
from tests.ray.driver.test_checkpoint import SAME, write


@pytest.mark.usefixtures("local_ray")
def test_a_finished_run_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    caplog.set_level(logging.INFO, "gkd")
    assert explain_finished(load(SAME), tmp_path) is None
    (tmp_path / "summary.json").write_text('{"steps": 10}')
    assert explain_finished(load(SAME), tmp_path) is None  # its student is missing: that part is to be done
    assert "its student" in caplog.text
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=20)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    done = f"the run in {tmp_path} is finished: all 10 steps are done and the trained student is in {tmp_path}/model; "
    own = f"it left no checkpoint, so more steps are a run of their own, with model.path={tmp_path}/model"
    assert explain_finished(load(SAME), tmp_path) == done + own
    write(load(SAME), tmp_path, 8)
    more = f"a larger trainer.total_steps would go on after step 8, from {tmp_path}/checkpoints/step_8"
    assert explain_finished(load(SAME), tmp_path) == done + more
    assert explain_finished(load({"trainer": {"total_steps": 11}}), tmp_path) is None
    with pytest.raises(ConfigError, match=r"10 steps, .*trainer\.total_steps=9"):
        explain_finished(load({"trainer": {"total_steps": 9}}), tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert explain_finished(load(SAME), tmp_path) is None
