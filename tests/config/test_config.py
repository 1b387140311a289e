"""Settings: what is accepted, and that everything else is one line that names it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st

from gkd.config import Config, escape, load, parse_gpus, settings
from gkd.config.compose import _compose_group, compose, groups
from gkd.config.loading import dump_yaml, read_run, read_yaml
from gkd.config.overrides import overrides_of
from gkd.driver.run import _write
from gkd.errors import ConfigError
from gkd.observability.run_files import RunFiles
from tests.messages import NODE, OWN, entries, names_what_is_wrong, refusal

OWN_MODELS = ["model.path=/x", "data.train_files=[a]", "data.val_files=[b]"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0-1", [0, 1]), ("4,5,6,7", [4, 5, 6, 7]), (7, [7]), ([3, 1], [1, 3]), ("0,2-4", [0, 2, 3, 4]), (None, None)],
)
def test_gpu_ranges(value: object, expected: list[int] | None) -> None:
    assert parse_gpus(value) == expected


@pytest.mark.parametrize("name", [name for name in settings() if name.endswith("timeout_s") and "NAME" not in name])
def test_a_time_that_no_call_can_wait_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}="):
        compose(["+recipe=grpo", "reward.functions=[code]", f"{name}=1e10"])


@pytest.mark.parametrize("placement", groups()["placement"])
def test_every_recipe_goes_with_every_placement(placement: str) -> None:
    for recipe in groups()["recipe"]:
        assert compose([f"+recipe={recipe}", f"placement={placement}"]).recipe == recipe


@pytest.mark.parametrize("value", ["", "a", "3-1", "0,0", "-1", "1.5", "0-", True, [], "0-99999"])
def test_what_is_no_gpu_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_gpus(value)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12, unique=True))
def test_every_list_of_gpus_is_read_back(indices: list[int]) -> None:
    assert parse_gpus(",".join(map(str, indices))) == sorted(indices)


def test_every_setting_says_what_it_means() -> None:
    assert all(meaning for meaning in settings().values())


@pytest.mark.parametrize(
    "overrides",
    [
        ["+recipe=grpo", "reward.functions=[accuracy,length]", "reward.weights=[1,0]"],
        ["+recipe=grpo", "reward.weights=[0]", "algorithm.overlong={action: penalty, buffer: 2}"],
        ["+recipe=grpo", "reward.weights=[0]", "algorithm.advantage.teacher_kl=1"],
        ["+recipe=distill_and_reward", "reward.weights=[0]"],
    ],
)
def test_rewards_may_be_logged_alone_beside_what_is_learned_from(overrides: list[str]) -> None:
    """With nothing beside them they are refused, as tests/messages.txt has it."""
    assert compose(overrides).reward.weights in ([1.0, 0.0], [0.0])


def test_one_text_is_a_list_of_one_wherever_texts_are_a_list(tmp_path: Path) -> None:
    lone = ["reward.functions=accuracy", "trainer.trackers=tensorboard", "rollout.stop=x", "data.train_files=q.jsonl"]
    lone += ["data.val_sets.a.rewards=format", "data.val_sets.a.files=q.jsonl", "data.val_sets.a.stop=y"]
    one, several = (
        compose(["+recipe=grpo", "data.val_files=a", "model.path=/m", *overrides])
        for overrides in (lone, [f"{key}=[{value}]" for key, _, value in (text.partition("=") for text in lone)])
    )
    assert one == several
    assert one.reward.set_functions == ["format"]
    assert one.data.val_sets["a"].stop == ["y"]
    assert compose(["+recipe=grpo", "actor.lora.target_modules=all-linear"]).actor.lora.target_modules == "all-linear"


def test_a_whole_number_may_be_written_as_a_float() -> None:
    config = compose(["+recipe=grpo", "trainer.total_steps=1e3", "rollout.top_k=4.0", "cluster.simulate_gpus=2.0"])
    assert repr((config.trainer.total_steps, config.rollout.top_k, config.cluster.simulate_gpus)) == "(1000, 4, 2)"
    assert repr(compose(["+recipe=grpo", "rollout.temperature=1.0"]).rollout.temperature) == "1.0"


def test_a_variable_of_the_environment_may_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "STEPS": "7",
        "SEED": "9007199254740993",
        "LR": "1e-4",
        "COMPILE": "True",
        "HALF": "1.5",
        "NONE": "",
    }.items():
        monkeypatch.setenv(name, text)
    big = ["trainer.seed=${oc.env:SEED}", "trainer.resume=${oc.env:COMPILE}"]
    texts = ["trainer.total_steps=${oc.env:STEPS}", "actor.lr=${oc.env:LR}", "actor.compile=${oc.env:COMPILE}"]
    config = compose(["+recipe=grpo", *texts, "trainer.run_name=${oc.env:STEPS}", *big])
    values = config.trainer.total_steps, config.actor.lr, config.actor.compile, config.trainer.run_name
    assert repr(values) == "(7, 0.0001, True, '7')"
    assert (config.trainer.seed, config.trainer.resume) == (9007199254740993, True)
    lists = ["actor.betas=[${oc.env:LR},0.9]", "rollout.stop=[${oc.env:STEPS}]", "algorithm.kl.coef=0.1"]
    config = compose(["+recipe=grpo", *lists, "watch.reward_kl.accuracy=[0,${oc.env:HALF}]"])
    values = config.actor.betas, config.watch.reward_kl["accuracy"], config.rollout.stop
    assert repr(values) == "([0.0001, 0.9], [0.0, 1.5], ['7'])"
    for name in ("HALF", "NONE"):
        with pytest.raises(ConfigError, match="valid integer"):
            compose(["+recipe=grpo", f"trainer.total_steps=${{oc.env:{name}}}"])
    with pytest.raises(ConfigError, match=r"actor\.betas\.1="):
        compose(["+recipe=grpo", "actor.betas=[0.9,${oc.env:NONE}]"])


@pytest.mark.parametrize("command", [command for command in entries() if not command.startswith((OWN, NODE))])
def test_a_mistake_is_one_line_that_names_it(command: str) -> None:
    """Of tests/messages.txt; tests/messages.py says how to renew it."""
    line = refusal(command)
    assert "\n" not in line
    assert names_what_is_wrong(line, command)
    assert line == entries()[command]


@pytest.mark.parametrize("recipe", ["distill_and_reward", "grpo"])
def test_a_configuration_that_was_written_is_one_that_can_be_run(recipe: str, tmp_path: Path) -> None:
    """A run's config.yaml says everything, and overrides come on top of it."""
    first = compose([f"+recipe={recipe}", "trainer.gpus=0-1", "actor.lr=0.5"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(first))
    assert compose([str(file)]) == first
    assert compose([str(file), "actor.lr=0.25"]) == first.model_copy(
        update={"actor": first.actor.model_copy(update={"lr": 0.25})}
    )
    assert compose([str(file), "placement=cpu", "trainer.gpus=null"]).cluster.simulate_gpus == 3


def test_a_file_in_a_directory_that_a_sweep_named_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "actor.lr=1e-05,trainer.seed=0"
    run.mkdir()
    first = compose(["+recipe=grpo", "actor.lr=1e-5"])
    (run / "config.yaml").write_text(dump_yaml(first))
    monkeypatch.chdir(tmp_path)
    for name in (str(run / "config.yaml"), f"{run.name}/config.yaml"):
        assert compose([name, "actor.lr=1e-5"]) == first


@hypothesis.settings(max_examples=5)
@given(st.text("\\$\\${}:'\"a, \n", min_size=1, max_size=12))
def test_a_text_with_a_literal_interpolation_is_read_again_as_it_is(text: str) -> None:
    config = load({"data": {"prompt_key": text, "chat_template_kwargs": {"a": [text]}}, "rollout": {"stop": [text]}})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_yaml(config))
        file.flush()
        assert read_yaml(file.name) == config.model_dump()
        assert compose([file.name]) == config


def test_a_file_of_settings_in_the_home_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("recipe: grpo\ntrainer: {seed: 5}\n")
    config = compose(["~/mine.yaml"])
    assert (config.recipe, config.trainer.seed) == ("grpo", 5)
    with pytest.raises(ConfigError, match=r"^~/other\.yaml: "):
        compose(["~/other.yaml"])


def test_the_last_placement_counts_and_of_recipes_one_is_chosen() -> None:
    assert compose(["+recipe=grpo", "placement=cpu", "placement=8gpu"]) == compose(["+recipe=grpo", "placement=8gpu"])
    with pytest.raises(ConfigError, match=r"\+recipe=grpo and \+recipe=gspo"):
        compose(["+recipe=grpo", "+recipe=gspo"])


@pytest.mark.parametrize("text", ["a ${b", "${trainer.seed}", r"C:\${x}", "${"])
def test_an_escaped_interpolation_is_the_text(text: str, tmp_path: Path) -> None:
    config = compose([f"trainer.output_dir='{escape(text)}'"])
    assert config.trainer.output_dir == text
    _write(config, config, tmp_path)
    assert compose([str(tmp_path / "config.yaml")]) == config
    assert RunFiles(tmp_path).read_config() == config


def test_a_runs_file_has_what_was_decided_and_beside_it_what_was_requested(tmp_path: Path) -> None:
    """So that those who read the run know how it ran, and the file serves another machine."""
    file, teacher, pool = tmp_path / "config.yaml", "teacher.models={a.b: x, c: y}", "teacher.n_gpus_per_node=2"
    own = ["model.path=x", "data.train_files=[y]", "data.val_files=[z]", "data.teacher_key=k", teacher, pool]
    requested = compose(["+recipe=on_policy_distill", *own, "trainer.resume=auto"])
    names = ["weights.transfer=object_store", "cluster.offload=false", "rollout.kv_cache_gb=3", "teacher.engine=torch"]
    ran = compose(["+recipe=on_policy_distill", *own, *names])
    _write(requested, ran, tmp_path)
    first = compose(["+recipe=on_policy_distill", *own])  # a new run of it begins
    assert compose([str(file)]) == read_run(file, as_requested=True) == first
    assert read_run(file) == RunFiles(tmp_path).read_config() == ran
    assert read_yaml(file)["requested"] == {
        "rollout": {"kv_cache_gb": None},
        "teacher": {"engine": "auto"},
        "weights": {"transfer": "auto"},
        "cluster": {"offload": "auto"},
    }
    _write(first, first, tmp_path)
    assert "requested" not in read_yaml(file)
    file.write_text("requested: 1\n")
    with pytest.raises(ConfigError, match=r"config\.yaml .*requested .* 1"):
        compose([str(file)])


def test_names_of_models_and_sets_may_have_dots_and_dashes() -> None:
    evaluation = {
        "models": {"Qwen2.5-0.5B": "/a", "plain": "/b"},
        "evaluate.sets": {
            "math-v1.0": {"files": ["a.jsonl", "it's b.jsonl"], "chat_template_kwargs": {"enable_thinking": False}}
        },
    }
    config = compose(overrides_of(evaluation))
    assert config.models == evaluation["models"]
    assert config.evaluate.sets.keys() == {"math-v1.0"}
    assert config.evaluate.sets["math-v1.0"].files == ["a.jsonl", "it's b.jsonl"]
    assert config.evaluate.sets["math-v1.0"].chat_template_kwargs == {"enable_thinking": False}
    teachers = [f"++teacher.models.{name}=/{name}" for name in ("llama3.1-8b", "qwen2.5")]
    own = ["model.path=/m", "data.train_files=[t]", "data.val_files=[v]", "data.teacher_key=k"]
    config = compose([*own, *teachers, "data.val_sets.v2.0.files=[a]", "teacher.n_gpus_per_node=2"])
    assert config.teacher.models == {"llama3.1-8b": "/llama3.1-8b", "qwen2.5": "/qwen2.5"}
    assert config.data.val_sets["v2.0"].files == ["a"]
    with pytest.raises(ConfigError, match=r"data\.val_sets\.v2\.0\.limit"):
        compose(["+recipe=grpo", "data.val_sets.v2.0.files=[a]", "data.val_sets.v2.0.limit=0"])
    with pytest.raises(ConfigError, match=r"data\.val_sets\.v2\.0\.fils"):
        compose(["+recipe=grpo", "data.val_sets.v2.0.fils=[a]"])


def test_names_of_models_and_sets_may_be_numbers(tmp_path: Path) -> None:
    """YAML and Hydra's grammar read them as such; a run's own file, merged with more settings, has the same names."""
    file = tmp_path / "own.yaml"
    file.write_text("data:\n  val_sets:\n    1.0: {files: [a]}\n    2: {files: [b]}\n")
    config = compose(["+recipe=grpo", str(file), "data.val_sets.3.1.files=[c]", "data.val_sets.1.0.every=5"])
    assert [(name, own.files, own.every) for name, own in config.data.val_sets.items()] == [
        ("1.0", ["a"], 5), ("2", ["b"], None), ("3.1", ["c"], None)
    ]  # fmt: skip
    file.write_text(dump_yaml(config))
    assert compose([str(file), "data.val_sets.1.0.every=5"]) == config
    assert compose(["models.2=/a", "evaluate.sets.1.0.files=[a]"]).models == {"2": "/a"}


def test_groups_and_settings_take_a_plus_or_none_and_may_name_each_other() -> None:
    assert compose(["+rollout.n=3", "recipe=grpo", "+placement=cpu"]) == compose(
        ["rollout.n=3", "+recipe=grpo", "placement=cpu"]
    )
    assert compose(["trainer.output_dir='runs/${trainer.seed}'"]).trainer.output_dir == "runs/0"
    assert compose(["trainer.seed=5", "~trainer.seed"]).trainer.seed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {lrr: 1}", "unknown setting actor.lrr"),
        ("a: [", "odd.yaml"),
        ("- 1", "odd.yaml"),
        ("5", "odd.yaml .*configuration"),
        ("actor: [1]", "odd.yaml"),
        ("a: \xff", "odd.yaml"),
        ('trainer: {output_dir: "a\\0b"}', r"trainer.output_dir='a\\x00b'"),
        ('data: {train_files: ["\\ud800"]}', r"data.train_files='\\ud800'"),
    ],
)
def test_a_file_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        compose([str(tmp_path / "odd.yaml")])
    with pytest.raises(ConfigError, match=rf"none.yml: {os.strerror(errno.ENOENT)}"):
        compose([str(tmp_path / "none.yml")])


def test_a_file_may_name_its_recipe_and_its_placement(tmp_path: Path) -> None:
    """As if they stood on the command line: recipe, placement, the file's own values, then the command line's."""
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: grpo\nplacement: 8gpu\nrollout: {n: 4}\nactor: {lr: 0.5}\n")
    overrides = ["+recipe=grpo", "placement=8gpu", "rollout.n=4", "actor.lr=0.5"]
    config = compose([str(file)])
    assert config == compose(overrides)
    assert (config.recipe, config.algorithm.name, config.teacher.n_gpus_per_node) == ("grpo", "grpo", 4)
    assert config.rollout.max_response_length == 12  # the built-in task's
    over = compose([str(file), "placement=cpu", "actor.lr=0.25"])
    assert (over.cluster.simulate_gpus, over.actor.lr, over.rollout.n) == (3, 0.25, 4)
    assert compose([str(file), "+recipe=gspo"]).algorithm.name == "gspo"


def test_a_file_without_a_recipe_has_the_command_lines_below_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("rollout: {n: 4}\n")
    config = compose([str(tmp_path / "mine.yaml"), "+recipe=grpo"])
    assert config == compose(["+recipe=grpo", "rollout.n=4"])
    assert config.cluster.simulate_gpus == "auto"  # the placement that there is without one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: grop", r"mine.yaml: recipe=grop: .*mean grpo\?\); .*gspo"),
        ("placement: 9gpu", r"mine.yaml: placement=9gpu: .*8gpu"),
        ("recipe: [grpo]", r"mine.yaml: recipe=\['grpo'\]: "),
        ("recipe: {a: 1}", r"mine.yaml: recipe=\{'a': 1\}: "),
        ("defaults: [a]", r"setting defaults"),
        ("actor.lr: 1.0\nactor: {lr: 2.0}", r"mine.yaml: actor\.lr .*twice"),
        ("actor.lr: 1.0\nactor: 5", r"mine.yaml .*: actor "),
        ("trainer: 5", r"mine.yaml .*: trainer "),
        ("actor: {lora.r: 16}", r"actor\.lora\.r=16: .*\bdots\b"),
        ("trainer: {wandb.project: x}", r"trainer\.wandb\.project=x: .*\bdots\b"),
        ("data.val_sets.a:", r"data\.val_sets\.a=null: "),
        ("actor.lora: {r: 16}\nactor: {lora: {alpha: 3}}", r"mine.yaml: actor\.lora .*twice"),
        ("teacher: {model: x}", r"^teacher\.model=x: teacher\.model .*\bsection\b"),
        ("teacher.model: x", r"^teacher\.model=x: teacher\.model .*\bsection\b"),
        ("data: {val_sets: {hard: x.jsonl}}", r"^data\.val_sets\.hard=x\.jsonl: .*\bsection\b"),
        ("actor.lora: {rr: 16}", r"actor\.lora\.rr \(did .*actor\.lora\.r\?"),
        ("1: 2", r"unknown setting 1"),
        ("null: 2", r"mine.yaml .*\bread"),
        ("actor:\n  lr: ${oc.env:NOWHERE}", r"mine.yaml .*NOWHERE"),
        ("model: {_target_: os.system}", r"unknown setting model._target_"),
        ("a: &a [*a]", r"mine.yaml .*nested"),
        ("actor: {lr: 1, lr: 2}", r"mine.yaml"),
    ],
)
def test_an_odd_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        compose([str(tmp_path / "mine.yaml")])
    assert "\n" not in str(caught.value)


def test_what_a_file_takes_from_a_setting_is_what_the_setting_has_in_the_end(tmp_path: Path) -> None:
    """Also of one that the command line replaces, or that the file has not, and of whole sections."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: on_policy_distill\nmodel: {path: one}\n"
        "data: {train_files: [a], val_files: [a], system_prompt: '\\${model.path}'}\n"
        "teacher: {model: {path: 'big/${model.path}'}}\n"
        "actor: {lr: '${.weight_decay}', weight_decay: 1e-7}\n"
        "trainer: {run_name: 'seed-${trainer.seed}-${oc.env:OF_A_TEST}'}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_A_TEST", "${x}")
        own, other = (
            compose([str(file)]),
            compose([str(file), "model.path=two", "trainer.seed=5", "actor.weight_decay=1e-8"]),
        )
    assert [own.teacher.model.path, own.actor.lr, own.trainer.run_name] == ["big/one", 1e-7, "seed-0-${x}"]
    assert [other.teacher.model.path, other.actor.lr, other.trainer.run_name] == ["big/two", 1e-8, "seed-5-${x}"]
    assert own.data.system_prompt == other.data.system_prompt == "${model.path}"
    file.write_text(
        "recipe: grpo\ntrainer.run_group: g\ntrainer.run_name: '${trainer.run_group}-${actor.lr}'\nactor: {lr: 1e-4}\n"
    )
    assert compose([str(file), "actor.lr=2e-4"]).trainer.run_name == "g-0.0002"
    file.write_text("recipe: '${oc.env:NOT_OF_A_TEST,grpo}'\ntrainer: {run_name: 'n${rollout.n}'}\n")
    assert compose([str(file), "rollout.n=4"]).trainer.run_name == "n4"
    file.write_text("recipe: ${oc.env:OF_A_TEST}\ntrainer: {seed: 3}\nwatch: ${trainer}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_A_TEST", "grpo")
        with pytest.raises(ConfigError, match=r"watch\.seed"):
            compose([str(file)])


def test_settings_of_a_file_may_have_dots_in_their_names_and_sections_may_be_empty(tmp_path: Path) -> None:
    """As ``gkd settings`` prints them, and as what is left of a section whose lines are all comments."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: grpo\nactor.lr: 0.5\nactor:\n  # grad_clip: 1\nrollout: {n: 4}\nrollout.temperature: 0.7\n"
        "data.val_sets.2024.limit: 3\ndata.val_sets: {2024: {files: [x.jsonl]}}\nactor.lora:\n"
    )
    config = compose([str(file)])
    given = ["+recipe=grpo", "actor.lr=0.5", "rollout.n=4", "rollout.temperature=0.7"]
    assert config == compose([*given, "data.val_sets.2024={files: [x.jsonl], limit: 3}"])


def test_sections_and_users_own_settings_of_a_file_may_have_dots_in_their_names(tmp_path: Path) -> None:
    """Those of names that the user chooses as well, whatever dots these have."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: grpo\nactor.lora.alpha: 3.0\nactor.lora: {r: 16}\ndata.val_sets.v1: {files: [x]}\n"
        "data.val_sets.v2.0.files: [y]\nreward.length: {target_length: 7}\n"
    )
    given = ["+recipe=grpo", "actor.lora={r: 16, alpha: 3.0}", "reward.length.target_length=7"]
    assert compose([str(file)]) == compose([*given, "data.val_sets.v1.files=[x]", "data.val_sets.v2.0.files=[y]"])
    file.write_text("models.Qwen2.5-7B: x\nevaluate.sets.a: {files: [b]}\n")
    assert compose([str(file)]) == compose(["models.Qwen2.5-7B=x", "evaluate.sets.a.files=[b]"])


def test_a_set_whose_name_has_dots_may_be_given_as_a_whole(tmp_path: Path) -> None:
    separate = compose(["models.m=x", "evaluate.sets.v1.0.files=[a]", "evaluate.sets.v1.0.limit=3"])
    file = tmp_path / "mine.yaml"
    for text in (
        "evaluate.sets.v1.0: {files: [a]}\nevaluate.sets.v1.0.limit: 3\n",
        "evaluate.sets: {v1.0: {files: [a], limit: 3}}\n",
        "evaluate: {sets: {v1.0: {files: [a], limit: 3}}}\n",
    ):
        file.write_text(text)
        assert compose(["models.m=x", str(file)]) == separate
    assert compose(["models.m=x", "evaluate.sets.v1.0={files:[a],limit:3}"]) == separate
    with pytest.raises(ConfigError, match=r"sets\.v1\.0\.fils"):
        compose(["models.m=x", "evaluate.sets.v1.0={fils:[a]}"])
    file.write_text("evaluate.sets.v1.0: [a]\n")
    with pytest.raises(ConfigError, match=r"sets\.v1"):
        compose(["models.m=x", str(file)])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('data.system_prompt="${HOME}"', r"^data\.system_prompt: .*HOME.* \\\$\{$"),
        (
            'data.chat_template_kwargs={"enable_thinking": false}',
            r"quotes: 'data\.chat_template_kwargs=\{enable_thinking:false\}'$",
        ),
    ],
)
def test_how_a_value_is_written_is_said(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(["+recipe=grpo", override])
    assert compose(["+recipe=grpo", 'data.system_prompt="\\${HOME}"']).data.system_prompt == "${HOME}"


def test_a_range_alone_says_how_many() -> None:
    config = compose(["trainer.gpus=2-3", "rollout.gpus=0-1", "teacher.gpus=4-7"])
    assert [(p.n_gpus_per_node, p.gpus) for _, p in config.pools()] == [(2, [2, 3]), (2, [0, 1]), (4, [4, 5, 6, 7])]


def test_a_group_that_is_not_there_passes_its_guests_on() -> None:
    chain = ["placement=3gpu", "reward.functions=[accuracy,reward_model]", "reward_model.model.path=x"]
    whole = compose(["+recipe=distill_and_reward", *chain, "algorithm.kl.coef=0.1"])
    assert whole.hosts() == {"rollout": "actor", "reference": "teacher", "reward_model": "teacher"}
    assert compose(["+recipe=distill_and_reward", *chain]).hosts() == {"rollout": "actor", "reward_model": "teacher"}
    alone = compose(["+recipe=grpo", *chain, "algorithm.kl.coef=0.1"])
    assert alone.hosts() == {"rollout": "actor", "reward_model": "reference"}
    assert alone.may_share() == {frozenset(("actor", "rollout")), frozenset(("reference", "reward_model"))}


def test_an_external_teacher_has_no_pool() -> None:
    config = compose(
        ["model.path=a", "teacher.server_ip=127.0.0.1", "data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"]
    )
    assert [name for name, _ in config.pools()] == ["trainer", "rollout"]


def test_the_built_in_task_settings_yield_to_the_command_line() -> None:
    assert compose(["+recipe=on_policy_distill"]).trainer.total_steps == 200
    assert compose(["recipe=on_policy_distill", "trainer.total_steps=5"]).trainer.total_steps == 5


@pytest.mark.parametrize("group", groups())
def test_every_choice_of_every_group_composes(group: str) -> None:
    for choice in groups()[group]:
        plus = "" if group == "placement" else "+"
        assert isinstance(compose([f"{plus}{group}={choice}"]), Config)


@pytest.mark.parametrize(
    ("before", "after"),
    [("2gpu", "8gpu"), ("cpu", "8gpu"), ("auto", "3gpu"), ("single_gpu", "4gpu"), ("4x8gpu", "8gpu"), ("8gpu", "auto")],
)
def test_a_placement_on_the_command_line_replaces_that_of_a_runs_file(before: str, after: str, tmp_path: Path) -> None:
    """As of a run on a laptop that is to go on, or be done again, on a larger machine."""
    file, recipe = tmp_path / "config.yaml", "+recipe=on_policy_distill"
    file.write_text(dump_yaml(compose([recipe, f"placement={before}"])))
    assert compose([str(file), f"placement={after}"]) == compose([recipe, f"placement={after}"])
    file.write_text(dump_yaml(compose([recipe, f"placement={before}", "teacher.max_num_seqs=7", "plan.nodes=[5]"])))
    own = compose([str(file), f"placement={after}"])
    assert own.teacher.max_num_seqs == 7
    assert own.plan.nodes == ([5] if after == "auto" else compose([f"placement={after}"]).plan.nodes)


def test_a_program_that_uses_hydra_itself_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("mine: 1\n")
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
        _compose_group.cache_clear()
        assert compose(["+recipe=grpo", "placement=2gpu"]).recipe == "grpo"
        assert hydra_compose("theirs").mine == 1
    assert not GlobalHydra.instance().is_initialized()
