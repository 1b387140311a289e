"""Settings of classes that a section names, built-in ones and users' own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from gkd.config.base import Settings
from gkd.config.compose import compose
from gkd.config.open import OWN, OpenSettings
from gkd.errors import ConfigError
from gkd.registry import Registry, absolute


class Plain:
    """An entry without settings."""


class Scaled:
    """An entry with one."""

    class Config(Settings):
        scale: float = Field(2.0, gt=0, description="a factor")


class Section(OpenSettings):
    registry: ClassVar[Registry] = Registry(
        "section.name", {"plain": f"{__name__}:Plain", "scaled": f"{__name__}:Scaled"}
    )
    name: str = "plain"


def test_a_class_takes_its_own_settings_with_their_defaults_and_checks() -> None:
    assert Section(name="scaled").own().scale == 2.0
    assert Section.model_validate({"name": "scaled", "scale": 3.0}).own().scale == 3.0
    assert dict(Section.settings_of_entries("section.")) == {"section.scale": "scaled: a factor"}
    assert Section(name="plain").own() is None


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ({"name": "scaled", "scale": -1.0}, False),
        ({"name": "plain", "scale": 3.0}, True),
        ({"name": "scaled", "sacle": 3.0}, True),
    ],
)
def test_a_setting_that_the_class_does_not_take_is_refused_by_its_key(given: dict[str, object], unknown: bool) -> None:
    with pytest.raises(ValidationError) as refused:
        Section.model_validate(given)
    error = refused.value.errors()[0]
    assert error["type"] == OWN and error["ctx"]["unknown"] == unknown
    assert error["ctx"]["key"] == next(key for key in given if key != "name")


def test_a_class_in_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import pydantic\nclass Mine:\n  class Config(pydantic.BaseModel):\n    width: int = 4\n")
    own = Section.model_validate({"name": f"{file}:Mine", "width": 5})
    assert own.own().width == 5 and own.model_dump() == {"name": f"{file}:Mine", "width": 5}
    monkeypatch.chdir(tmp_path)
    assert absolute("mine.py:Mine") == f"{file}:Mine" and absolute("mine:Mine") == "mine:Mine"


@pytest.mark.parametrize("name", ["scald", "nowhere:Mine", "/no/such/file.py:Mine", "pathlib:Paths"])
def test_a_name_that_stands_for_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.name"):
        Section.registry.load(name)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["rollout.engine=sglang"], "rollout.engine"),
        (["rollout.engine=pathlib:Path"], "rollout: engine=pathlib:Path cannot sample"),
        (["rollout.engine=gkd.inference.vllm_scorer:VLLMScorer"], "cannot sample"),
        (["teacher.engine=hf"], "teacher.engine"),
        (["reference.engine=gkd.inference.hf:HFSampler"], "reference: .* cannot score"),
        (["reward_model.engine=vllm"], "reward_model.engine"),
        (
            ["rollout.engine=hf", "rollout.n_gpus_per_node=2", "rollout.tensor_parallel_size=2"],
            "tensor_parallel_size=2",
        ),
        (["weights.transfer=gloo"], "weights.transfer"),
        (["weights.directory=/tmp"], "weights.directory"),
        (["weights.transfer=nccl", "rollout.engine=hf"], "weights.transfer=nccl: rollout.engine=hf"),
    ],
)
def test_an_engine_or_a_transfer_that_cannot_do_it_is_refused(overrides: list[str], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting) as refused:
        compose(overrides)
    assert "\n" not in str(refused.value)
