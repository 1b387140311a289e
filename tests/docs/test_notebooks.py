"""Notebooks of the recipes: executed as they stand, and with settings and names that there are."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import gkd
from gkd.config.compose import compose
from gkd.config.overrides import overrides_of
from tests.docs.pages import ROOT

NOTEBOOKS = sorted(ROOT.glob("recipes/*/*.ipynb"))


def code(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_was_executed_in_order_without_an_error(notebook: Path) -> None:
    cells = code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_its_settings_are_accepted_and_its_names_are_there(notebook: Path) -> None:
    sources = ["".join(cell["source"]) for cell in code(notebook)]
    imported = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imported if node.module == "gkd" for alias in node.names]
    assert names and all(callable(getattr(gkd, name)) for name in names)
    first: dict[str, Any] = {}
    exec(sources[0], first)  # imports and settings
    assert compose(overrides_of(first["settings"])).recipe == first["settings"]["recipe"]
