"""The benchmarks, which no test runs, import what is there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).with_name("benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("gkd", "tests"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
