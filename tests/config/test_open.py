"""Settings of classes that a section names, built-in ones and users' own."""

from __future__ import annotations

import math
import re
import sys
from datetime import date
from enum import Enum
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError, computed_field, field_validator

from gkd.config.base import Settings
from gkd.config.compose import compose, compose_run
from gkd.config.learning import ADVANTAGES
from gkd.config.loading import dump_run, dump_yaml
from gkd.config.open import OWN, OpenSettings
from gkd.config.own_code import source_digest
from gkd.config.registry import Registry, make_absolute
from gkd.errors import ConfigError


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


class Unkept:
    """An entry whose settings are others once they were written and read again."""

    class Config(BaseModel):
        percent: float = 0.0
        key: SecretStr = SecretStr("")
        note: str = Field("", exclude=True)
        size: float = Field(1.0, alias="n")

        @field_validator("percent")
        @classmethod
        def _divide(cls, value: float) -> float:
            return value / 100


class Doubled:
    """An entry that states a value of its own."""

    class Config(BaseModel):
        half: float = math.nan
        size: float = Field(1.0, alias="n", serialization_alias="n")

        @computed_field  # type: ignore[prop-decorator]
        @property
        def whole(self) -> float:
            return 2 * self.half


def test_a_value_that_a_runs_file_would_not_keep_is_refused() -> None:
    """Such as a secret's stars, which a worker was given in its place."""
    registry = Registry("section.name", {"unkept": f"{__name__}:Unkept", "doubled": f"{__name__}:Doubled"})

    class Keeping(OpenSettings):
        name: str = "doubled"

    Keeping.registry = registry
    for name, value in (("percent", 50.0), ("key", "sk-123"), ("note", "x")):
        with pytest.raises(ValidationError) as refused:
            Keeping.model_validate({"name": "unkept", name: value})
        context = refused.value.errors()[0]["ctx"]
        assert context["key"] == name
        assert "sk-123" not in str(context)
    for values in ({}, {"half": 2.0, "size": 3.0}):
        section = Keeping.model_validate({"name": "doubled", **values})
        again = Keeping.model_validate(section.model_dump())
        assert again.class_settings().size == section.class_settings().size == values.get("size", 1.0)
        assert "whole" not in section.model_dump()


@pytest.mark.parametrize("setting", ["evaluate.mode=single", "evaluate.output_dir=there"])
def test_a_run_takes_no_settings_of_evaluations_but_those_of_its_file(setting: str, tmp_path: Path) -> None:
    composed = compose_run(["+recipe=grpo"])
    saved = tmp_path / "config.yaml"
    evaluating = composed.evaluate.model_copy(update={"output_dir": str(tmp_path)})  # as where that is there already
    saved.write_text(dump_run(composed, composed.model_copy(update={"evaluate": evaluating})))
    assert compose_run([str(saved), "trainer.seed=3"]).trainer.seed == 3
    with pytest.raises(ConfigError, match="gkd evaluate"):
        compose_run(["+recipe=grpo", setting])


def test_a_class_takes_its_own_settings_with_their_defaults_and_checks() -> None:
    assert Section(name="scaled").class_settings().scale == 2.0
    assert Section.model_validate({"name": "scaled", "scale": 3.0}).class_settings().scale == 3.0
    ((name, meaning, _),) = Section.settings_of_entries("section.")
    assert (name, meaning) == ("section.scale", "scaled: a factor")
    assert Section(name="plain").class_settings() is None


@pytest.mark.parametrize(
    ("values", "unknown"),
    [
        ({"name": "scaled", "scale": -1.0}, False),
        ({"name": "plain", "scale": 3.0}, True),
        ({"name": "scaled", "sacle": 3.0}, True),
    ],
)
def test_a_setting_that_the_class_does_not_take_is_refused_by_its_key(values: dict[str, object], unknown: bool) -> None:
    with pytest.raises(ValidationError) as refused:
        Section.model_validate(values)
    error = refused.value.errors()[0]
    assert error["type"] == OWN and error["ctx"]["unknown"] == unknown
    assert error["ctx"]["key"] == next(key for key in values if key != "name")


def test_a_class_in_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import pydantic\nclass Mine:\n  class Config(pydantic.BaseModel):\n    width: int = 4\n")
    own = Section.model_validate({"name": f"{file}:Mine", "width": 5})
    with pytest.raises(ValidationError) as refused:  # also where the class' own model would let it pass
        Section.model_validate({"name": f"{file}:Mine", "wdith": 5})
    context = refused.value.errors()[0]["ctx"]
    assert context["key"] == "wdith" and context["unknown"]
    assert own.class_settings().width == 5 and own.model_dump() == {"name": f"{file}:Mine", "width": 5}
    monkeypatch.chdir(tmp_path)
    assert make_absolute("mine.py:Mine") == f"{file}:Mine" and make_absolute("mine:Mine") == "mine:Mine"


class Kind(Enum):
    SOFT, HARD = "soft", "hard"


class Varied:
    """An entry with settings of types that YAML has not."""

    class Config(Settings):
        band: tuple[float, float] = (0.1, 0.9)
        kinds: frozenset[str] | None = frozenset("a")
        file: Path = Path("here")
        kind: Kind = Kind.SOFT


class Loose:
    """An entry whose settings are a model that drops what it does not know."""

    class Config(BaseModel):
        class Inner(BaseModel):
            x: int = 1

        inner: Inner = Inner()
        scale: float = Field(0.1, alias="factor")
        day: date = date(2026, 1, 2)


class OfAnyType(OpenSettings):
    registry: ClassVar[Registry] = Registry(
        "section.name", {"varied": f"{__name__}:Varied", "loose": f"{__name__}:Loose"}
    )
    name: str = "varied"


def test_settings_of_types_that_yaml_has_not_are_read_as_they_are_written() -> None:
    own = OfAnyType.model_validate({"band": [0.2, 0.8], "kinds": ["b"], "kind": "hard"})
    again = OfAnyType.model_validate(own.model_dump())
    expected = {"band": (0.2, 0.8), "kinds": {"b"}, "file": Path("here"), "kind": Kind.HARD}
    for section in (own, again):
        assert dict(section.class_settings()) == expected
    for values, key in (({"band": ["low", 0.8]}, "band.0"), ({"kind": "odd"}, "kind"), ({"file": 3}, "file")):
        with pytest.raises(ValidationError) as refused:
            OfAnyType.model_validate(values)
        assert refused.value.errors()[0]["ctx"]["key"] == key


@pytest.mark.parametrize("values", [{"inner": {"y": 2}}, {"factor": 0.2}])
def test_no_setting_is_dropped_without_a_word(values: dict[str, object]) -> None:
    """Neither within a model of a model, nor by another name than its field's."""
    own = OfAnyType.model_validate({"name": "loose", "inner": {"x": 2}, "scale": 0.3, "day": "2026-01-03"})
    settings = own.class_settings()
    assert (settings.inner.x, settings.scale, settings.day) == (2, 0.3, date(2026, 1, 3))
    with pytest.raises(ValidationError) as refused:
        OfAnyType.model_validate({"name": "loose", **values})
    context = refused.value.errors()[0]["ctx"]
    assert context["unknown"] and context["key"] in ("inner.y", "factor")


@pytest.mark.parametrize("name", ["scald", "nowhere:Mine", "/no/such/file.py:Mine", "pathlib:Paths"])
def test_a_name_that_stands_for_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.name"):
        Section.registry.load(name)


def test_what_is_not_of_the_base_is_refused() -> None:
    registry = Registry("section.name", {}, f"{__name__}:Plain")
    assert registry.load(f"{__name__}:Plain") is Plain
    with pytest.raises(ConfigError, match=r"^section\.name=.*:Scaled: .*\.Plain\b"):
        registry.load(f"{__name__}:Scaled")


def test_a_setting_that_several_classes_have_is_listed_with_all_of_them() -> None:
    class Both(Section):
        registry: ClassVar[Registry] = Registry(
            "section.name", {"one": f"{__name__}:Scaled", "two": f"{__name__}:Scaled"}
        )
        name: str = "one"

    ((name, meaning, _),) = Both.settings_of_entries("")
    assert (name, meaning) == ("scale", "one, two: a factor")


def test_a_run_says_every_setting_of_its_classes_and_another_class_brings_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    first = compose(["algorithm.loss.name=jsd"])
    assert first.model_dump()["algorithm"]["loss"]["beta"] == 0.5
    assert first.algorithm.advantage.model_dump()["divide_by_std"] is True
    file.write_text(dump_yaml(first))
    assert compose([str(file)]) == first
    assert compose([str(file), "algorithm.loss.beta=0.3"]).algorithm.loss.class_settings().beta == 0.3
    named = compose([str(file), "algorithm.loss.name=jsd", "algorithm.loss.top_k=4"])
    assert named.algorithm.loss.class_settings().beta == 0.5
    assert "beta" not in compose([str(file), "algorithm.loss.name=forward_kl"]).model_dump()["algorithm"]["loss"]


def test_an_own_reward_of_a_runs_file_can_be_left_out_or_replaced(tmp_path: Path) -> None:
    mine, file = tmp_path / "mine.py", tmp_path / "config.yaml"
    mine.write_text(
        "import pydantic\nclass Own:\n  class Config(pydantic.BaseModel):\n    width: int = 4\n"
        "  def __init__(self, config): pass\n  def __call__(self, completion): return 0.0\n"
    )
    run = compose(["+recipe=grpo", f"reward.functions=['{mine}:Own',format]", "reward.Own.width=5"])
    file.write_text(dump_yaml(run))
    assert compose([str(file), "reward.Own.width=6"]).reward.settings_of(f"{mine}:Own").width == 6
    assert "Own" not in compose([str(file), "reward.functions=[format]"]).model_dump()["reward"]


@pytest.mark.parametrize(
    "override",
    [
        "reward.functions=true",
        "rollout.engine=true",
        "weights.transfer=1",
        "trainer.trackers=5",
        "data.task=3",
        "evaluate.strategies=2",
    ],
)
def test_a_value_that_is_no_name_of_a_class_is_refused_by_its_setting(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as refused:
        compose(["+recipe=grpo", override])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["rollout.engine=sglang"], "rollout.engine"),
        (["rollout.engine=pathlib:Path"], "rollout.engine=pathlib:Path: .*gkd.inference"),
        (["rollout.engine=gkd.inference.vllm_scorer:VLLMScorer"], "cannot sample"),
        (["teacher.engine=hf"], "teacher.engine"),
        (["reference.engine=gkd.inference.hf:HFSampler"], "reference.* cannot score"),
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


OWN_CLASSES = """
import pydantic
from gkd.algorithms.advantages import AdvantageEstimator
from gkd.inference.engine import InferenceEngine
from gkd.losses.divergence import Divergence
from gkd.weights.transfer import Transfer
class Twice(AdvantageEstimator):
    class Config(pydantic.BaseModel):
        name: str = "x"
    def compute_advantages(self, rewards): return rewards
class Abstract(AdvantageEstimator):
    pass
class NoModel(AdvantageEstimator):
    Config = 3
    def compute_advantages(self, rewards): return rewards
class Plain:
    can_sample = True
class NoSender(Transfer):
    pass
class Checked(AdvantageEstimator):
    class Config(pydantic.BaseModel):
        scale: float = 0.0
        @pydantic.model_validator(mode="after")
        def check(self):
            1 / self.scale
    def compute_advantages(self, rewards): return rewards
class Narrow(AdvantageEstimator):
    def compute_advantages(self): return 1
class Unmade(AdvantageEstimator):
    def __init__(self, config): raise KeyError("scale")
    def compute_advantages(self, rewards): return rewards
class Awaited(AdvantageEstimator):
    async def compute_advantages(self, rewards): return rewards
class Typo(Divergence):
    teacher_logprobs = "tokens"
    def __call__(self, log_p, log_q): return log_p - log_q
class Hot(InferenceEngine):
    can_sample, temperatures = True, 2.0
    def __init__(self, spec): ...
    def add(self, key, request): ...
    def has_unfinished_requests(self): return False
    def step(self): return []
class Wide(AdvantageEstimator):
    @staticmethod
    def compute_advantages(rewards, groups): return rewards
ready = Twice(None)
"""


@pytest.mark.parametrize(
    ("setting", "name", "why"),
    [
        ("algorithm.advantage.name", "Twice", "setting name .*Twice"),
        ("algorithm.advantage.name", "Checked", r"in Checked\.Config: ZeroDivisionError: .*mine\.py, line"),
        ("weights.transfer", "NoSender", "attribute sender"),
        ("algorithm.advantage.name", "Abstract", "method compute_advantages"),
        ("algorithm.advantage.name", "NoModel", "pydantic"),
        ("algorithm.advantage.name", "Narrow", "compute_advantages .* rewards: .*arguments"),
        ("algorithm.advantage.name", "Wide", "compute_advantages .* rewards: .*'groups'"),
        ("algorithm.advantage.name", "Unmade", r"Unmade .*KeyError: 'scale' .*mine\.py, line"),
        ("algorithm.advantage.name", "Awaited", "compute_advantages .*async"),
        ("algorithm.loss.name", "Typo", "teacher_logprobs is 'tokens': .*'top_k' or 'token'"),
        ("rollout.engine", "Hot", r"temperatures is 2\.0: .*tuple"),
        ("algorithm.advantage.name", "ready", "its class"),
        ("algorithm.name", "Plain", "Composition"),
        ("weights.transfer", "Plain", "no gkd.weights.transfer.Transfer"),
        ("rollout.engine", "Plain", "no gkd.inference.engine.InferenceEngine"),
    ],
)
def test_a_class_that_will_not_do_is_refused_in_one_line(setting: str, name: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_CLASSES)
    with pytest.raises(ConfigError, match=why) as refused:
        compose(["+recipe=grpo", f"{setting}={file}:{name}"])
    assert "\n" not in str(refused.value)


def test_a_file_is_read_and_its_class_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is loaded for every block of logits, and a plan loads it ten thousand times."""
    file = tmp_path / "once.py"
    file.write_text("class Mine: ...\n")
    monkeypatch.chdir(tmp_path)
    registry = Registry("section.name", {})
    own = registry.load("once.py:Mine")
    file.unlink()
    assert registry.load(f"{file}:Mine") is registry.load("once.py:Mine") is own
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match=r"once\.py"):  # another file, which is not there
        registry.load("once.py:Mine")


def test_an_error_at_import_is_shown_with_its_place_and_what_is_printed_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    neighbour, file, fine = (tmp_path / f"{name}.py" for name in ("beside_broken", "broken", "fine"))
    neighbour.write_text("\n\nimport nowhere_at_all\n")
    file.write_text("import beside_broken\n")
    fine.write_text("print('hello')\ndef compute_advantages(): ...\n")
    registry = Registry("section.name", {})
    with pytest.raises(ConfigError, match=f"nowhere_at_all.*{neighbour}, line 3"):
        registry.load(f"{file}:Mine")
    registry.load(f"{fine}:compute_advantages")
    assert capsys.readouterr().out == ""


def test_two_files_do_not_get_each_others_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two modules of one name Python has the first alone, also for the file beside the second."""
    monkeypatch.setattr("sys.path", [*sys.path])
    registry = Registry("section.name", {})
    for folder, value in (("one", 1), ("copy", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour_of_own.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "mine.py").write_text(
            "def value():\n    from neighbour_of_own import VALUE\n    return VALUE\n"
        )
    for folder in ("one", "copy"):
        assert registry.load(f"{tmp_path}/{folder}/mine.py:value")() == 1
    with pytest.raises(ConfigError, match=r"ImportError: .*one/neighbour_of_own\.py.*two/neighbour_of_own\.py"):
        registry.load(f"{tmp_path}/two/mine.py:value")


def test_what_was_edited_is_loaded_anew_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, where one process runs one thing after another; but not within a run."""
    monkeypatch.setattr("sys.path", [*sys.path])
    registry, file, beside = Registry("section.name", {}), tmp_path / "edited.py", tmp_path / "beside_edited.py"
    other = tmp_path / "other_edited.py"
    other.write_text("class Other: ...\n")
    kept = registry.load(f"{other}:Other")
    values, digests = [], []
    for factor, value in ((1, 2), (3, 2), (3, 4)):
        beside.write_text(f"VALUE = {value}\n")
        file.write_text(f"from beside_edited import VALUE\nclass Mine:\n    value = {factor} * VALUE\n")
        before = registry.load(f"{file}:Mine").value
        assert not values or before == values[-1]
        compose_run(["+recipe=grpo"])  # as a command does when it begins
        values.append(registry.load(f"{file}:Mine").value)
        digests.append(source_digest(file))
    assert values == [2, 6, 12] and len(set(digests)) == 3
    assert registry.load(f"{other}:Other") is kept


def test_methods_may_take_what_they_are_called_with_in_any_way(tmp_path: Path) -> None:
    file = tmp_path / "free.py"
    file.write_text(
        "from gkd.algorithms.advantages import AdvantageEstimator\n"
        "class Static(AdvantageEstimator):\n"
        "  @staticmethod\n  def compute_advantages(rewards, scale=1): return rewards\n"
        "class Any(AdvantageEstimator):\n  def compute_advantages(self, *values): return values[0]\n"
        "class Batch(AdvantageEstimator):\n  def __call__(self, rewards, groups): return rewards\n"
    )
    for name in ("Static", "Any", "Batch"):
        kind = ADVANTAGES.load(f"{file}:{name}")
        assert list(kind(None)([0.0, 2.0], [0, 0])) == [0.0, 2.0]
        assert kind.needs_batch == (name == "Batch")


def test_a_class_may_state_that_it_takes_no_settings(tmp_path: Path) -> None:
    """Not even those of the class that it extends."""
    file = tmp_path / "bare.py"
    file.write_text(
        "from gkd.algorithms.advantages import AdvantageEstimator\n"
        "class Bare(AdvantageEstimator):\n  Config = None\n  def compute_advantages(self, rewards): return rewards\n"
    )
    own = f"algorithm.advantage.name={file}:Bare"
    assert compose(["+recipe=grpo", own]).algorithm.advantage.class_settings() is None
    with pytest.raises(ConfigError, match=r"^unknown .*algorithm\.advantage\.scale: Bare "):
        compose(["+recipe=grpo", own, "algorithm.advantage.scale=2"])


def test_that_own_code_takes_no_settings_is_stated_where_it_is_given_one(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(
        "from gkd.observability.trackers.tracker import Tracker\n"
        "def flat(completion): return 1.0\n"
        "class Silent(Tracker):\n"
        "  def __init__(self, run): pass\n"
        "  def log(self, step, metrics): pass\n"
        "  def close(self, failed): pass\n"
    )
    for named, setting in (
        (f"reward.functions=[{file}:flat]", "reward.flat.floor"),
        (f"trainer.trackers=[{file}:Silent]", "trainer.Silent.url"),
    ):
        with pytest.raises(ConfigError, match=rf"^unknown .*{re.escape(setting)}: {setting.split('.')[1]} "):
            compose(["+recipe=grpo", named, f"{setting}=1"])
    with pytest.raises(ConfigError, match=r"^unknown .*reward\.curt\.floor$"):  # of what is not named nothing is known
        compose(["+recipe=grpo", f"reward.functions=[{file}:flat]", "reward.curt.floor=1"])
