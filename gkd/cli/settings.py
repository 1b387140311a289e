"""``gkd settings [WORD ...]``: every setting with its type or choices, default and meaning, or those about the words.

A word is part of a setting's name, a choice, the beginning of a word of its meaning, or what TRL, verl, slime, OpenRLHF
or prime-rl call it. ``python -m gkd.main --settings [WORD ...]`` prints the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from gkd.errors import Parser, end_with_reader, entry_point

WIDTH = 110


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    parser = Parser("gkd settings", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="show settings that are about all of these")
    show(parser.parse_args(arguments).words)
    return 0


def show(words: Sequence[str]) -> None:
    """Print settings about all of ``words``; without words every one, and the choices of what else is selected by name.

    Raises ConfigError where there are none.
    """
    from gkd.config.compose import groups
    from gkd.config.describe import describe_all, search

    choices = {group: " or ".join(names) for group, names in groups().items()}  # recipe, placement, ...
    described = [replace(setting, kind=choices.pop(setting.name, setting.kind)) for setting in describe_all()]
    shown = search(words, described) if words else described
    with end_with_reader():
        for setting in shown:
            kind = f"  ({setting.kind})" if setting.kind else ""
            print(f"{setting.name}={setting.default}{kind}")
            print(textwrap.fill(setting.meaning, WIDTH, initial_indent="    ", subsequent_indent="    "))
        for group, names in choices.items() if not words else ():
            print(f"{group}=  ({names})")
