"""The rooms of the project: what each may import, and how large a file may be (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import gkd
from gkd.actor.publishing import WeightSource
from gkd.actor.rank_state import RankState
from gkd.actor.training import RankTrainer
from gkd.actor.worker import ActorWorker
from gkd.config import RewardModel, Teacher
from gkd.config import Rollout as RolloutSettings
from gkd.config.cluster import TRANSFERS
from gkd.config.data import TASKS
from gkd.config.evaluation import STRATEGIES
from gkd.config.groups import TRACKERS
from gkd.config.learning import ADVANTAGES, ALGORITHMS, DIVERGENCES, SURROGATES
from gkd.config.rewards import REWARDS
from gkd.rollout.pipeline import ScoringPipeline
from gkd.rollout.receiving import WeightLoader
from gkd.rollout.worker import RolloutWorker
from gkd.scoring.server import ScoringServer
from gkd.scoring.worker import ScoringWorker

PACKAGE = Path(gkd.__file__).parent
LEVELS = (
    ("errors", "version"),
    ("config", "durable", "schedule", "types"),
    ("data", "modeling", "rewards"),
    ("algorithms", "losses", "weights"),
    ("inference",),
    ("cluster",),
    ("planning", "scoring"),
    ("actor", "rollout"),
    ("observability",),
    ("evaluation",),
    ("driver",),
    ("cli",),
)
"""Rooms, each of which imports those of earlier levels and, within a level, none in a circle."""
STARTS = (
    "__init__", "__main__", "doctor", "evaluate", "export", "main", "monitor", "plan", "recipes", "report", "teacher",
)  # fmt: skip
"""What is typed or imported from outside."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def syntax() -> dict[type, list[tuple[Path, Any]]]:
    """Return all nodes of the project's syntax by their kinds, with the files that have them."""
    nodes: dict[type, list[tuple[Path, Any]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            nodes.setdefault(type(node), []).append((path, node))
    return nodes


@pytest.fixture(scope="module", autouse=True)
def forget_syntax() -> Iterator[None]:
    yield
    syntax.cache_clear()  # half a million nodes, which tests after these would search for garbage


def imported_names() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield every import, wherever in a file: in functions and for type checkers too.

    Of ``from module import name``: the module, and the names; of ``import module`` there are no names.
    """
    for path, node in syntax()[ast.Import]:
        yield from ((path, alias.name, []) for alias in node.names)
    for path, node in syntax()[ast.ImportFrom]:
        if node.module is not None:
            yield path, node.module, [alias.name for alias in node.names]


def imports() -> Iterator[tuple[str, str]]:
    """Yield every import within the project: the room that has it, and the room that it is of."""
    for path, module, names in imported_names():
        for name in [f"gkd.{name}" for name in names] if module == "gkd" else [module]:
            if name.startswith("gkd.") and name.split(".")[1] != room_of(path):
                yield room_of(path), name.split(".")[1]


def test_imports_run_one_way() -> None:
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    up = {(room, other) for room, other in imports() if room not in STARTS and level[room] < level[other]}
    assert not up


def test_no_rooms_import_each_other() -> None:
    arrows: dict[str, set[str]] = {}
    for room, other in imports():
        arrows.setdefault(room, set()).add(other)
    TopologicalSorter(arrows).prepare()  # raises CycleError


def file_imports() -> dict[Path, set[Path]]:
    """Map every file to those that it imports."""
    files = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in files.items()}
    arrows: dict[Path, set[Path]] = {path: set() for path in files}
    for path, module, imported in imported_names():
        within = [f"{module}.{name}" for name in imported]
        names = [name if name in modules else module for name in within] or [module]
        arrows[path] |= {modules[name] for name in names if name in modules} - {path}
    return arrows


def test_no_files_import_each_other() -> None:
    TopologicalSorter(file_imports()).prepare()  # raises CycleError


def test_no_folders_import_each_other() -> None:
    def folder(path: Path) -> Path:
        return path if path.parent == PACKAGE else path.parent  # of the outermost each file is one by itself

    arrows: dict[Path, set[Path]] = {}
    for path, imported in file_imports().items():
        arrows.setdefault(folder(path), set()).update({folder(other) for other in imported} - {folder(path)})
    TopologicalSorter(arrows).prepare()  # raises CycleError


def test_files_have_at_most_400_lines() -> None:
    assert [str(p) for p in PACKAGE.rglob("*.py") if len(p.read_text(encoding="utf-8").splitlines()) > 400] == []


NO_VERBS = {"A", "An", "Be", "How", "It", "Say", "See", "Tell", "The", "This", "What", "Where", "Whether", "Why"}


def definitions(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield every node of a kind, with the file that has it."""
    return ((str(path.relative_to(PACKAGE)), node) for path, node in syntax()[kind])


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Those of properties name what they hold."""
    wrong = []
    for file, node in definitions(ast.FunctionDef):
        words = (ast.get_docstring(node) or "").split()
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if words and not is_property and words[0] in NO_VERBS:
            wrong.append(f"{file}: {node.name}")
    assert wrong == []


ADJECTIVES = {
    "absent", "broken", "computed", "concurrent", "copied", "differing", "disturbed", "doubtful", "due", "empty",
    "expected", "faster", "first", "full", "idle", "imported", "kept", "known", "living", "logged", "longer",
    "longest", "measured", "misfit", "missing", "nearest", "newest", "next", "no", "noting", "ok", "only", "other",
    "planned", "quick", "quickest", "rated", "requested", "resident", "running", "sent", "shared", "sharing",
    "silent", "sleeping", "slowest", "smaller", "smallest", "stale", "stated", "unmanaged", "unreadable", "usual",
    "waiting", "weighted", "whole", "wrong",
}  # fmt: skip
PARTICIPLE = re.compile(r"(?!(bring|feed|packing|ping|seed|setting)$)[a-z]+(ed|ing)")
"""A name of one word; those left out are verbs and nouns."""


def test_functions_are_named_by_verbs() -> None:
    """A name as ``first_death`` is that of a value; a function finds it. Properties are values."""
    named = [
        f"{file}: {node.name}"
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for file, node in definitions(kind)
        if not node.name.startswith("__")
        if node.name.lstrip("_").partition("_")[0] in ADJECTIVES or PARTICIPLE.fullmatch(node.name.lstrip("_"))
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert named == []


PRONOUNS = {
    "asked", "chosen", "found", "given", "his", "its", "kept", "known", "meant", "mine", "ours", "own", "said", "seen",
    "taken", "their", "theirs", "them", "they", "told", "wanted", "whose",
}  # fmt: skip


def test_variables_are_named_by_what_they_hold() -> None:
    """And parameters, and fields: nobody can tell what ``own`` is."""
    stored = [
        (f"{file}: {node.id}", node.id) for file, node in definitions(ast.Name) if isinstance(node.ctx, ast.Store)
    ]
    stored += [(f"{file}: {node.arg}", node.arg) for file, node in definitions(ast.arg)]
    assert [place for place, name in stored if name.lstrip("_") in PRONOUNS] == []


def test_docstrings_of_classes_name_what_they_are() -> None:
    """Or begin with a verb, and not with a question."""
    questions = {"How", "What", "Where", "Who", "Which", "Why"}
    docstrings = [(f"{file}: {node.name}", ast.get_docstring(node) or "") for file, node in definitions(ast.ClassDef)]
    assert [name for name, text in docstrings if text.partition(" ")[0] in questions] == []


def names_of_types() -> Iterator[tuple[str, str]]:
    """Yield the names of classes, and of what modules call a type, with the file: ``_X`` as ``X``."""
    for file, node in definitions(ast.ClassDef):
        yield file, node.name.lstrip("_")
    for file, module in definitions(ast.Module):
        for node in module.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id.lstrip("_") for target in targets if isinstance(target, ast.Name)]
            yield from ((file, name) for name in names if name[0].isupper() and not name.isupper())


def test_no_two_classes_have_one_name() -> None:
    """A name stands for one thing, whether it is a class, private or another name for a type.

    But ``Config``: that is by which name the entries of registries have their settings (gkd/config/registry.py).
    """
    files: dict[str, list[str]] = {}
    for file, name in names_of_types():
        files.setdefault(name, []).append(file)
    assert {name: where for name, where in files.items() if len(where) > 1 and name != "Config"} == {}


def test_small_files_are_entries_of_registries() -> None:
    """A file of a few lines is one more place to look into: only what is named by itself has one."""
    texts = [PACKAGE.parent / "pyproject.toml", *(PACKAGE / "config").glob("*.py")]
    named = {name for text in texts for name in re.findall(r"\"(gkd[\w.]+):", text.read_text(encoding="utf-8"))}
    small = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and room_of(path) not in (*STARTS, "version")
        if len(path.read_text(encoding="utf-8").splitlines()) < 35
    ]
    assert [name for name in small if name not in named] == []


REGISTRIES = (
    *(RolloutSettings.registry, Teacher.registry, RewardModel.registry),
    *(DIVERGENCES, SURROGATES, ADVANTAGES, ALGORITHMS),
    *(TRANSFERS, REWARDS, TRACKERS, TASKS, STRATEGIES),
)
ENTRIES = {name: entry for registry in REGISTRIES for name, entry in registry.entries.items()}
OTHER_MEANINGS = {
    "accuracy": r"\bcommon\b",  # figures of an evaluation
    "length": r"\bfinish_reason\b",
    "reward_model": r"\bgroup\b|\bpools\b",
}
"""What else some entries' names stand for, by what they are compared with then."""
MENTIONS = {
    "actor/group.py": {"reverse_kl", "sft"},  # what validation measures, whatever a run learns from
    "actor/pretrained.py": {"format"},  # of a safetensors file
    "cli/doctor/": {"nccl", "torch", "vllm"},  # the packages
    "cli/launch/package.py": {"wandb"},  # its folder
    "cluster/workers/": {"torch"},
    "config/actor.py": {"cosine"},  # of the learning rate
    "config/validating.py": {"reverse_kl"},  # a metric
    "evaluation/run.py": {"torch", "vllm"},  # whose versions results have
    "inference/vllm_models.py": {"vllm"},
    "recipes/__init__.py": {"sort_digits"},  # a folder
}
"""Files, and folders, where the name of an entry is written as well, and what it means there."""


def compared() -> Iterator[tuple[str, list[Any], str]]:
    """Yield what is compared, or matched: the place, the constants, and the code of what they are compared with."""
    for file, node in definitions(ast.Compare):
        if "sys.modules" not in ast.unparse(node):  # a library of that name
            sides = [side for one in (node.left, *node.comparators) for side in getattr(one, "elts", [one])]
            others = " ".join(ast.unparse(side) for side in sides if not isinstance(side, ast.Constant))
            yield f"{file}:{node.lineno}", [side.value for side in sides if isinstance(side, ast.Constant)], others
    for file, node in definitions(ast.Match):
        for case in node.cases:
            constants = [part.value for part in ast.walk(case.pattern) if isinstance(part, ast.Constant)]
            yield f"{file}:{case.pattern.lineno}", constants, ast.unparse(node.subject)


def test_nobody_asks_for_an_entry_by_its_name() -> None:
    """What an engine, a reward or a loss can do, its class states (gkd/config/registry.py)."""
    places = []
    for place, constants, others in compared():
        entries = ENTRIES.keys() & set(constants)
        if entries := {name for name in entries if not re.search(OTHER_MEANINGS.get(name, r"(?!)"), others)}:
            places.append(f"{place}: {entries}")
    assert places == []


def test_entries_are_named_by_their_registries_alone() -> None:
    """And by its own module, so that one is renamed in one place. Metrics and groups have some of these names."""
    own = {f"config/{name}.py" for name in ("cluster", "data", "evaluation", "groups", "learning", "rewards")}
    places = []
    for file, node in definitions(ast.Constant):
        if file in own or node.value not in ENTRIES.keys() - OTHER_MEANINGS.keys():
            continue
        is_meant = any(file.startswith(begin) and node.value in names for begin, names in MENTIONS.items())
        module = ENTRIES[node.value].partition(":")[0].removeprefix("gkd.").replace(".", "/")
        if not is_meant and file != f"{module}.py":
            places.append(f"{file}:{node.lineno}: {node.value}")
    assert places == []


Worker = tuple[type, dict[str, type]]
ACTOR: Worker = (ActorWorker, {"trainer": RankTrainer, "state": RankState, "weights": WeightSource})
ROLLOUT: Worker = (RolloutWorker, {"weights": WeightLoader, "pipeline": ScoringPipeline})
SCORER: Worker = (ScoringWorker, {"server": ScoringServer})
CALLED: dict[str, dict[str, tuple[Worker, ...]]] = {
    "actor/group.py": {"": (ACTOR,)},
    "actor/ranks.py": {"": (ACTOR,)},
    "cluster/health/heartbeat.py": {"": (ROLLOUT, SCORER)},
    "cluster/workers/reports.py": {"": (ACTOR, ROLLOUT, SCORER)},
    "driver/groups/engines.py": {"engines": (ROLLOUT, SCORER), "worker": (ROLLOUT,)},
    "driver/groups/scorers.py": {"": (SCORER,)},
    "driver/groups/weight_sync.py": {
        "self.actor.group": (ACTOR,),
        "root": (ACTOR,),
        "self._submit": (ROLLOUT,),
        "self._call_engines": (ROLLOUT,),
    },
    "driver/startup.py": {"rollout": (ROLLOUT,)},
    "evaluation/reloading.py": {"rollout": (ROLLOUT,)},
    "rollout/engine_group.py": {"": (ROLLOUT,)},
    "rollout/group.py": {"": (ROLLOUT,)},
    "scoring/watch.py": {"": (SCORER,)},
}
"""By files that call workers' methods by name: whose they are, by how what they are called on begins."""
ELSEWHERE = (
    "cluster/workers/engines.py",  # the parts of engines on further nodes, of vLLM's
    "weights/vllm_sources.py",  # vLLM's own interface
)
HOW = re.compile(
    r"call(_\w+)?|submit(_each|_control)?|control|remote|stream|_submit|_call(_\w+)?|_run|_of_one_step|_all_do"
)


def called_by_name() -> Iterator[tuple[str, str, str]]:
    """Yield the methods that are called by their names: file, what they are called on, and name."""
    for file, node in definitions(ast.Call):
        on = node.func
        if not (isinstance(on, ast.Attribute) and HOW.fullmatch(on.attr) and node.args):
            continue
        for name in node.args[1:2] if on.attr == "stream" else node.args[:1]:  # a stream is of one worker
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and file not in ELSEWHERE:
                yield file, ast.unparse(on), name.value


def has_method(worker: Worker, name: str) -> bool:
    """Return whether a worker, or the part of it that a dotted name begins with, has a method."""
    cls, parts = worker
    part, _, method = name.rpartition(".")
    return hasattr(parts[part], method) if part in parts else not part and hasattr(cls, method)


def test_methods_that_the_driver_calls_by_name_exist() -> None:
    """As ``trainer.update``, of a part of an actor's worker, or ``cache_bytes``, of a rollout's own."""
    names, lacking = set(), []
    for file, on, name in called_by_name():
        (workers,) = [those for begin, those in CALLED[file].items() if on.startswith(begin)]
        names.add(name)
        lacking += [f"{file}: {on}({name!r})" for worker in workers if not has_method(worker, name)]
    assert lacking == []
    assert names >= {"open_store", "progress", "cache_bytes", "submit", "stream_samples", "weights.send"}
    assert len(names) > 30
