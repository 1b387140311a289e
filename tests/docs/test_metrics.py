"""docs/metrics.md describes every metric, and none that nothing writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from tests.docs.pages import ROOT, is_described, metric_names, tables

READERS = re.compile(r"gkd/(cli|planning|observability/(page|trackers|live|progress|watch))\b")
"""What takes metrics by their names, and measures none."""
PREFIXES = "|".join(sorted({name.partition("/")[0] for name in metric_names() if "/" in name}))


def literals(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The strings among nodes, of f-strings the whole with {} for what is put in."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def written() -> tuple[set[str], set[str]]:
    """The names of metrics among the strings of what measures them, and what may be the end of one that is put in."""
    files = [file for file in (ROOT / "gkd").rglob("*.py") if not READERS.search(str(file))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    strings = set(literals(nodes))
    names = {text for text in strings if re.fullmatch(rf"(?:{PREFIXES})(?:/(?:[\w@]|{{}})+)+|step|epoch", text)}
    identifiers = {getattr(node, "attr", None) or getattr(node, "id", None) for node in nodes}
    return names, {text.rpartition("/")[2] for text in strings} | identifiers


def is_written(metric: str) -> bool:
    """Return whether a string is this name, but for NAME and such, or becomes it by putting in an end that there is."""
    names, ends = written()
    end = metric.rpartition("/")[2].removeprefix("stale_").removesuffix("k" if metric.endswith("@k") else "")
    put_in = ["[A-Z]+"]
    if end in ends or end.isupper():
        put_in.append(r"[\w@/]+" if metric.startswith("val/") else r"[\w@]+")
    patterns = (re.escape(name).replace(r"\{\}", part) for name in names for part in put_in)
    return any(re.fullmatch(pattern, metric) for pattern in patterns)


def test_every_metric_is_described() -> None:
    names, _ = written()
    assert len(names) > 40
    described = metric_names()
    patterns = {name: re.escape(name).replace(r"\{\}", r"[\w@/]+") for name in names}
    assert [n for n, pattern in patterns.items() if not any(re.fullmatch(pattern, own) for own in described)] == []


def test_every_metric_that_is_described_is_written() -> None:
    assert len(metric_names()) > 60
    assert [name for name in metric_names() if not is_written(name)] == []


@pytest.mark.parametrize(
    "name", ["timing_s/step_mean", "memory/GROUP/swapped_gb", "mismatch/stale_k4", "val/NAME/worst@k", "response/wait"]
)
def test_what_is_written_nowhere_is_noticed(name: str) -> None:
    assert not is_written(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", True), ("memory/actor/peak_gb", True), ("val/gsm8k/pass@8", True), ("val/reward/format/failed", True),
        ("perf/waits_for/driver", True), ("memory/actor/swapped_gb", False), ("val/gsm8k/pass", False),
    ],
)  # fmt: skip
def test_a_name_of_a_run_is_described_by_one_of_the_page(name: str, expected: bool) -> None:
    assert is_described(name) == expected


def test_every_metric_has_a_unit_and_a_healthy_range() -> None:
    """A dash states that there is none."""
    rows = list(tables((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert len(rows) > 60
    assert [row[0] for row in rows if len(row) != 4 or not all(row)] == []
