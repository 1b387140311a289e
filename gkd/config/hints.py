"""What may have been meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from gkd.config.names import ELSEWHERE, SECTIONS

TYPING_ERROR, SECTION_ALIKE, ALIKE = 0.9, 0.75, 0.6  # difflib's ratios
MOST_OWNERS = 2  # sections that may have a setting of one name for a hint to name them all


def suggest(name: str, valid_names: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for a misspelt choice, or an empty string when nothing is near."""
    choices = list(valid_names)
    longer = [choice for choice in choices if name and choice.startswith(name)][:1]
    return _question(longer or difflib.get_close_matches(name, choices, n=1, cutoff=0.6))


def hint(key: str, valid_names: Iterable[str]) -> str:
    """Return what a setting that is not among ``valid_names`` may mean, in brackets, or an empty string.

    First by meaning: another system's name for a setting here (:mod:`gkd.config.names`). Then by spelling, within the
    section that is named: what is spelt alike in another section means something else there.
    """
    plain = key.lstrip("-").replace("-", "_")
    names = [name for name in valid_names if plain.startswith(_key_prefix(name))]
    if plain in ELSEWHERE:
        return f" (here: {ELSEWHERE[plain]})"
    for section, meaning in SECTIONS.items():
        if f"{plain}.".startswith(f"{section}.") or plain.startswith(f"{section}_"):
            return f" (here: {meaning})"
    if misspelt := _find_in_section(plain, names, TYPING_ERROR):
        return _question(misspelt)
    for ending in _endings(plain):
        if ending in ELSEWHERE:
            return f" (here: {ELSEWHERE[ending]})"
        if "." in ending and ending in names:
            return _question([ending])
    return _question(_find_alike(plain, names))


def _key_prefix(name: str) -> str:
    """Return how a key has to begin that may mean ``name``: settings of sets and of evaluations do where one is."""
    begins, is_of_sets, _ = name.partition("NAME.")
    return begins if is_of_sets else "evaluate." if name.startswith("evaluate.") else ""


def _endings(key: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``b.c`` and ``c`` of ``a.b.c``."""
    while key:
        yield key
        key = key.partition(".")[2]


def _find_in_section(key: str, names: Sequence[str], cutoff: float) -> list[str]:
    """Return the setting of the section ``key`` names, perhaps misspelt, that its other parts are most like."""
    section, _, rest = key.partition(".")
    sections = dict.fromkeys(name.partition(".")[0] for name in names if "." in name)
    for match in difflib.get_close_matches(section, list(sections), n=1, cutoff=0.75):
        within = {name.partition(".")[2]: name for name in names if name.startswith(f"{match}.")}
        return [within[close] for close in difflib.get_close_matches(rest, list(within), n=1, cutoff=cutoff)]
    return []


def _find_alike(key: str, names: Sequence[str]) -> list[str]:
    """Return settings spelt like ``key``: of its section or, where it names none, those whose last part it is."""
    if longer := [name for name in names if name.startswith(key)]:
        return longer[:1]
    if "." in key:
        section, _, rest = key.partition(".")
        is_section = any(name.startswith(f"{section}.") for name in names)
        return _find_in_section(key, names, ALIKE) or (_owners(rest.rpartition(".")[2], names) if is_section else [])
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return (
        _owners(key, names)
        or difflib.get_close_matches(key, tops, n=1, cutoff=SECTION_ALIKE)
        or _find_leaves_alike(key, names)
    )


def _owners(leaf: str, names: Sequence[str]) -> list[str]:
    """Return settings whose last part is ``leaf``, where they are few."""
    owners = [name for name in names if name.rpartition(".")[2] == leaf]
    return owners if len(owners) <= MOST_OWNERS else []


def _find_leaves_alike(leaf: str, names: Sequence[str]) -> list[str]:
    leaves = {name.rpartition(".")[2] for name in names}
    close = difflib.get_close_matches(leaf, sorted(leaves), n=1, cutoff=0.75)
    return _owners(close[0], names) if close else []


def _question(names: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(names)}?)" if names else ""
