"""README, docs and recipes: links lead somewhere, commands are accepted, names exist."""

from __future__ import annotations

import re
import tomllib
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import yaml

from gkd.cli.command import PROGRAMS, main
from gkd.cli.plan import compose_plan
from gkd.cli.serve_teacher import compose_server
from gkd.cli.sweep import expand
from gkd.config import Config, Reward, hint, output_files, settings
from gkd.config.compose import compose
from gkd.config.registry import Registry
from gkd.errors import ConfigError
from gkd.planning.layout import gpu_hardware
from gkd.rewards.adapters import resolve
from gkd.rewards.completion import Completion
from tests.docs.pages import (
    OF_OTHERS,
    PAGES,
    ROOT,
    Command,
    anchors,
    commands,
    links,
    python_files,
    spans,
    tables,
    unknown_commands,
)

ALL = {f"{page.relative_to(ROOT)}: {command.text}": command for page in PAGES for command in commands(page)}
KNOWN = settings()
OF_A_RUN = ("launch/quickstart.sh", "launch/slurm.sbatch")
"""Scripts whose arguments are a run's."""


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_readme_has_every_file_that_a_run_leaves() -> None:
    """As they are named in :mod:`gkd.config.output_files`."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## What a run leaves\n")[1].split("\n## ")[0]
    shown = {name for file, _ in tables(section) for name in re.findall(r"`([\w.]+)/?.*?`", file)}
    names = {name for constant, name in vars(output_files).items() if constant.isupper() and isinstance(name, str)}
    assert len(names) > 9 and names - shown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    site = ROOT / "docs"
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert page.parent != site or site in target.parents, f"{path} is not on the site"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


PATHS = re.compile(r"(?<![\w/.-])(?:gkd|tests|conf|launch|recipes)/[\w/.-]*\w")
TESTS = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
NAMES = re.compile(r"(?<![\w/.-])(?:gkd|tests)(?:\.[A-Za-z_]\w*)+\b(?![/-])")


def has(owner: object, names: list[str]) -> bool:
    return not names or (hasattr(owner, names[0]) and has(getattr(owner, names[0]), names[1:]))


def is_there(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one or of its class."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        file = ROOT.joinpath(*parts[:end])
        if file.is_dir() or file.with_suffix(".py").is_file():
            return end == len(parts) or has(import_module(".".join(parts[:end])), parts[end:])
    return False


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_modules_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = [path for path in PATHS.findall(text) if not re.search(r"\b(NAME|DATE)\b", path)]
    lacking = [path for path in paths if not (ROOT / path).exists()]
    assert lacking + [name for name in NAMES.findall(text) if not is_there(name)] == []


def test_tests_that_are_named_are_there() -> None:
    named = [found for page in PAGES for found in TESTS.findall(page.read_text(encoding="utf-8"))]
    assert len(named) >= 10
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    text = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w]+\.md", str(text["nav"]))
    assert sorted(named) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def test_there_are_commands() -> None:
    assert len(ALL) > 60
    assert {command.program for command in ALL.values()} >= set(PROGRAMS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_of_a_page_is_left_out_of_these_tests(page: Path) -> None:
    assert list(unknown_commands(page)) == []


def test_commands_that_are_not_known_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = ["$ pytest -x tests", "docker stop NAME", "ray up cluster.yaml", "gkd doctor", "ray: 2.60"]
    page.write_text("".join(f"    {line}\n" for line in lines) + "\nOr `tensorboard --logdir DIR`.\n")
    assert list(unknown_commands(page)) == [
        "pytest -x tests", "docker stop NAME", "ray up cluster.yaml", "tensorboard --logdir DIR"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands are typed: with the project's files of one's own and with those that pages show."""
    path = tmp_path_factory.mktemp("typed")
    for folder in ("recipes", "tests"):
        (path / folder).symlink_to(ROOT / folder)
    for page in PAGES:
        for file, code in python_files(page):
            (path / file).write_text(code, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ALL)
def test_commands_are_accepted(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    require_accepted(ALL[name])


@pytest.mark.parametrize(
    "wrong",
    [
        "gkd --hepl", "gkd trian +recipe=grpo", "gkd plan --bset 8", "gkd plan +recipe=nope model.size=7b",
        "gkd plan +recipe=grpo model.size=7b plan.gpu_type=h1oo", "python -m gkd dta", "gkd train trainer.stps=1",
        "python -m tests.gpu.on_another_device", "python -m tests.message", "python tests/gpu/acceptance.py --onyl mps",
        "./launch/test.sh --al", "./launch/ray_cluster.sh worker --addres HOST:6379", "GKD_DEVICE=cpu ./launch/qick.sh",
        "pip install 'gkd[ligre]'", "pip install -e '.[docs,tset]'", "pip install nixel", "mkdocs build --strct",
        "./launch/quickstart.sh trainer.stps=3", "sbatch launch/slurm.sbatch +recipe=nope", "gkd compare --jsn FILE",
        "ray start --num-gpu=7", "kubectl apply -f launch/kuberay/rayjobs.yaml", "nvidia-cuda-mps-control -D",
        "ls  # or: pip install '.[tlr]'",
    ],
)  # fmt: skip
def test_wrong_commands_are_noticed(wrong: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    page = directory / "wrong.md"
    page.write_text(f"Type this:\n\n    {wrong}\n", encoding="utf-8")
    (command,) = commands(page)
    with pytest.raises(AssertionError):
        require_accepted(command)


def require_accepted(command: Command) -> None:
    """Assert that a command would be accepted where it is typed."""
    if command.program in OF_OTHERS:
        known = OF_OTHERS[command.program]
        assert [word for word in command.arguments if word not in known and not is_of_project(word)] == []
        return
    if "/" in command.program:
        script = ROOT / command.program
        assert script.is_file()
        text = script.read_text(encoding="utf-8")
        assert all(re.search(rf"(?<![\w-]){option}(?![\w-])", text) for option in command.options)
        if command.program in OF_A_RUN:
            assert error_of("train", tuple(command.overrides)) is None
        return
    if command.program.startswith("-"):
        with redirect_stdout(StringIO()):
            assert main([command.program]) == 0
        return
    assert command.program in PROGRAMS, f"gkd {command.program}"
    assert all(option in usage_of(command.program) for option in command.options)
    several = {"-m", "--multirun"} & {*command.options, *command.arguments}
    for overrides in [run.overrides for run in expand(command.overrides)] if several else [tuple(command.overrides)]:
        if (error := error_of(command.program, overrides)) is None:
            continue
        assert f"error: {error}" in command.page.read_text(encoding="utf-8")


def is_of_project(word: str) -> bool:
    """Return whether an argument is a file of this project, or its package with extras that there are."""
    extras = re.fullmatch(r"(?:gkd|\.)\[([\w,]+)\]", word)
    if extras is None:
        return "/" in word and (ROOT / word).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(extras[1].split(",")) <= set(project["optional-dependencies"])


@cache
def usage_of(program: str) -> str:
    """What ``gkd PROGRAM --help`` prints."""
    with pytest.raises(SystemExit) as end, redirect_stdout(StringIO()) as printed:
        main([program, "--help"])
    assert end.value.code == 0
    return printed.getvalue()


@cache
def error_of(program: str, overrides: tuple[str, ...]) -> str | None:
    """The error that composing a command's configuration ends with; None where it is accepted."""
    programs = ("train", "data", "plan", "verify-gpus", "submit", "serve-teacher", "evaluate")
    assert not overrides or program in programs
    try:
        if program == "plan" and overrides:
            gpu_hardware(compose_plan(overrides).plan)
        elif program == "serve-teacher" and overrides:
            compose_server(overrides)
        elif overrides:
            compose(overrides)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "migrating.md"):  # which name those of others and of earlier versions
        return
    name = re.compile(rf"(?<![\w./])(?:{'|'.join(Config.model_fields)})\.[a-z_][a-z0-9_.]*(?<!\.)(?![\w/])")
    for span in spans(page.read_text(encoding="utf-8")):
        if _program_like(span):
            continue  # checked as a command
        for setting in name.findall(span):
            if not setting.endswith((".md", ".py", ".json", ".jsonl", ".yaml")):
                assert setting in KNOWN or any(key.startswith(f"{setting}.") for key in KNOWN), setting


def _program_like(span: str) -> bool:
    return span.startswith(("gkd ", "python ", "./", "error: ", "unknown setting"))


def test_names_of_other_systems_are_answered_as_the_page_says() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [row for row in tables(text.partition("## Names of earlier versions")[0]) if row[0] != "gkd"]
    assert len(rows) > 50
    for ours, *theirs, _ in rows:
        ours_named = re.findall(r"`([^`]+)`", ours)
        assert all(name.removesuffix(".*") in KNOWN for name in ours_named), ours
        for cell in theirs:
            for name in re.findall(r"`([^`]+)`", cell):
                answer = hint(name, KNOWN)
                assert name in ours_named or any(own in answer for own in ours_named), f"{name}: {answer}"


def test_names_of_earlier_versions_are_answered() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [row for row in tables(text.partition("## Names of earlier versions")[2]) if "`" in row[1]]
    assert rows
    for new, old in rows:
        (setting,), (name,) = re.findall(r"`([^`]+)`", new), re.findall(r"`([^`]+)`", old)
        assert setting in hint(name, KNOWN), f"{name}: {hint(name, KNOWN)}"


def test_the_reward_of_the_page_works(directory: Path) -> None:
    brevity = Registry("reward.functions", {}).load(f"{directory / 'brevity.py'}:brevity")
    assert brevity(Completion("2 1 =", "1 2", "1 2", n_tokens=3, max_tokens=12, truncated=False)) == 0.75


def test_the_reward_of_groups_of_the_page_works(directory: Path) -> None:
    name = f"{directory / 'shortest_right.py'}:shortest_right"
    reward = Reward.model_validate({"functions": [name], "shortest_right": {"floor": 0.2}})
    assert reward.group_functions() == [name]
    group = [
        Completion("2 1 =", text, "1 2", n_tokens, 12, False) for text, n_tokens in (("1 2", 5), ("2", 1), ("1 2", 3))
    ]
    assert resolve(name, reward)(group) == pytest.approx([0.2, 0.0, 1.0])
