"""``gkd COMMAND``, and ``python -m gkd COMMAND``: finds the program that is meant and hands the arguments over.

Only the program that is named is imported, and each parses its arguments before it imports anything large, so that
``--help`` answers at once, also without the project's dependencies.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gkd.cluster.session.shutdown import leave, skip_teardown
from gkd.errors import ConfigError, entry_point
from gkd.version import __version__


@dataclass(frozen=True)
class Program:
    """One program, the ``main`` of gkd.cli.NAME; ``elsewhere`` is how it is started without ``gkd`` on the path."""

    elsewhere: str
    arguments: str
    meaning: str


PROGRAMS = {
    "train": Program("python -m gkd.main", "+recipe=on_policy_distill", "a run"),
    "plan": Program("python -m gkd.plan", "+recipe=grpo model.path=DIR", "what a layout needs, before it runs"),
    "data": Program("python -m gkd data", "+recipe=grpo model.path=DIR ...", "what a run's data becomes"),
    "doctor": Program("python -m gkd.doctor", "", "is this machine, or this cluster, ready?"),
    "monitor": Program("python -m gkd.monitor", "RUN_DIR", "how a run is doing, and its GPUs"),
    "evaluate": Program("python -m gkd.evaluate", "models.base=DIR +sets=gsm8k", "how good are models?"),
    "compare": Program("python -m gkd compare", "A.json B.json", "is the second model better, or was it chance?"),
    "report": Program("python -m gkd.report", "RUN_DIR [RUN_DIR ...]", "runs on a page to look at"),
    "export": Program("python -m gkd.export", "RUN_DIR [--step N] OUT", "a checkpoint as a Hugging Face model"),
    "serve-teacher": Program("python -m gkd.teacher.serve", "teacher.model.path=DIR", "a teacher outside the cluster"),
    "verify-gpus": Program("python launch/verify_gpus.py", "placement=8gpu", "which worker gets which GPU"),
    "submit": Program("python launch/submit.py", "+recipe=grpo", "a run as a job of a cluster"),
    "settings": Program("python -m gkd.main --settings", "[WORD ...]", "every setting, or those about WORD"),
}
"""Every program, by its name as a command of ``gkd``."""

OTHER_NAMES = {"teacher": "serve-teacher", "serve": "serve-teacher", "run": "train", "main": "train"}


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program that the first argument names; returns its exit code."""
    match arguments:
        case []:
            print(f"error: name a command\n{usage()}", file=sys.stderr)
            return 2
        case ["-h" | "--help"]:
            print(usage())
            return 0
        case ["--version"]:
            print(f"gkd {__version__}")
            return 0
        case [name, *rest] if name in PROGRAMS:
            program = importlib.import_module(f"gkd.cli.{name.replace('-', '_')}")
            return int(program.main(rest))
    raise ConfigError(f"gkd {arguments[0]}: there is no such command{_suggest(arguments)}; gkd --help lists them")


def usage() -> str:
    """Format the table of programs: how each is started, what it is for, and how else it can be started."""
    lines = [f"gkd {name} {program.arguments}".rstrip() for name, program in PROGRAMS.items()]
    left, middle = max(map(len, lines)), max(len(program.meaning) for program in PROGRAMS.values())
    rows = [
        f"  {line:{left}}  {program.meaning:{middle}}  {program.elsewhere}"
        for line, program in zip(lines, PROGRAMS.values(), strict=True)
    ]
    return "\n".join(
        ["usage: gkd COMMAND [ARGUMENTS]", "", *rows, "", "each has --help; gkd --version prints the version"]
    )


def _suggest(arguments: Sequence[str]) -> str:
    """Suggest a command that is spelt alike, or ``gkd train`` where a setting comes first; else an empty string."""
    name = arguments[0]
    if "=" in name or name.endswith((".yaml", ".yml")):
        return f" (did you mean gkd train {shlex.join(arguments)}?)"
    plain = name.lower().lstrip("-").replace("_", "-")
    longer = [command for command in PROGRAMS if plain and command.startswith(plain)]
    alike = longer or difflib.get_close_matches(plain, [*PROGRAMS, *OTHER_NAMES], n=1)
    return f" (did you mean gkd {OTHER_NAMES.get(alike[0], alike[0])}?)" if alike else ""


def run(*command: str) -> NoReturn:
    """End the process with the exit code of :func:`main`, also where a call never returned.

    ``command``: a program's name, where the command line begins with its arguments.
    """
    skip_teardown()
    # What imports make stays, and searching it is a sixth of their time: a collection after so many new objects.
    gc.set_threshold(20_000)
    leave(main([*command, *sys.argv[1:]]))
