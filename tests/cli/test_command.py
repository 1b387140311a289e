"""``gkd COMMAND``, and the settings that it describes and searches."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

import gkd
from gkd.cli.command import main
from gkd.config import settings
from gkd.config.base import Settings
from gkd.config.describe import describe, describe_all, search
from gkd.config.learning import ALGORITHMS
from gkd.config.open import OpenSettings
from gkd.config.registry import Registry
from gkd.errors import ConfigError
from gkd.version import __version__

ROOT = Path(gkd.__file__).parents[1]


def test_the_package_installs_the_command_and_the_typing_marker() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"gkd": "gkd.cli.command:run"}
    assert (ROOT / "gkd" / "py.typed").is_file()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gkd {__version__}\n"


def test_every_setting_is_described_with_kind_and_default() -> None:
    by_name = {setting.name: setting for setting in describe_all()}
    assert by_name.keys() == settings().keys()
    assert all(setting.kind and setting.default and setting.meaning for setting in by_name.values())
    assert (by_name["actor.lr"].kind, by_name["actor.lr"].default) == ("number > 0 or null", "null")
    assert by_name["trainer.total_steps"].kind == "whole number >= 1"
    assert by_name["trainer.batch_size"].kind == "whole number >= 1 and <= 1048576"
    assert by_name["rollout.temperature"].kind == "number >= 0.001 and <= 1000"
    assert by_name["actor.lr_decay"].kind == "constant or linear or cosine"
    assert by_name["cluster.offload"].kind == "auto or true or false"
    assert by_name["data.train_files"].default == "[]"
    assert by_name["algorithm.name"].kind.split(" or ") == [*ALGORITHMS.names(), "your own"]


def test_a_default_is_among_the_choices() -> None:
    """Of settings whose values are words, in a registry or a Literal, ``auto`` among them."""
    choices = {setting.name: setting.kind.split(" or ") for setting in describe_all()}
    defaults = {setting.name: setting.default for setting in describe_all() if setting.default != "null"}
    of_words = {name for name in defaults if re.fullmatch(r"[a-z]\w*", defaults[name]) and "text" not in choices[name]}
    assert of_words > {"weights.transfer", "teacher.engine", "reference.engine", "rollout.engine", "cluster.offload"}
    assert {name: choices[name] for name in of_words if defaults[name] not in [*choices[name], "true", "false"]} == {}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["lr"], {"actor.lr", "actor.lr_decay"}),
        (["num_generations"], {"rollout.n"}),
        (["cosine"], {"actor.lr_decay"}),
        (["teacher", "key_file"], {"teacher.key_file"}),
        (["gradient", "accumulation"], {"actor.max_tokens_per_micro_batch"}),
    ],
)
def test_settings_are_searched_by_name_and_by_the_names_of_other_systems(words: list[str], names: set[str]) -> None:
    matching = {setting.name for setting in search(words, describe_all())}
    assert names <= matching
    assert len(matching) < len(settings()) / 4


class Scaled:
    class Config(Settings):
        scale: float = Field(2.0, gt=0, description="a factor")


class Section(OpenSettings):
    registry: ClassVar[Registry] = Registry("section.name", {"scaled": f"{__name__}:Scaled"})
    name: str = Field("scaled", description="which")


def test_settings_of_classes_are_described_with_the_section_that_selects_them() -> None:
    selects, scale = describe(Section, "section.")
    assert (selects.name, selects.kind) == ("section.name", "scaled or your own")
    assert (scale.name, scale.kind, scale.default) == ("section.scale", "number > 0", "2.0")


def test_a_search_without_result_is_an_error() -> None:
    with pytest.raises(ConfigError):
        search(["nothing-is-called-so"], describe_all())


@pytest.mark.parametrize("words", [["placement"], ["8gpu_two_actors"], []])
def test_choices_that_files_of_conf_stand_for_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("placement=")]
    assert {"auto", "cpu", "single_gpu", "8gpu", "8gpu_two_actors"} <= set(re.findall(r"\w+", line))
    if not words:
        assert any(line.startswith("recipe=none") and "distill_and_reward or grpo" in line for line in lines)
        assert any(line.startswith("task=") for line in lines)  # no setting, but it is selected so


@pytest.mark.parametrize("arguments", [["settings", "lr"], ["train", "--settings", "lr"]])
def test_both_ways_to_list_settings(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "actor.lr=null  (number > 0 or null)" in capsys.readouterr().out
