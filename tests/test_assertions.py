"""Tests name what an error is about, and tests/messages.txt alone says in which words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MOST = 2  # words in a row; more are a sentence, which may change while the behaviour does not
WORD = r"(?:a|[A-Z]?[a-z]{2,})"
SENTENCE = re.compile(rf"(?<![\w./=\\-]){WORD}(?: {WORD}){{{MOST},}}(?![\w./=\[-])")

TOLD = re.compile(r"\bstr\(|\.(out|err|stdout|stderr|text)\b|\bmessages\b|getMessage")  # what a user reads


def text_of(node: ast.AST) -> str:
    """Join the literal parts of a string; what an f-string inserts is a datum."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "{0}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def parametrized(function: ast.FunctionDef, name: str) -> Iterator[ast.AST]:
    """Yield the values that a parameter of a test takes."""
    for decorator in function.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"):
            continue
        names, rows = decorator.args[:2]
        columns = (
            [text_of(n) for n in names.elts]
            if isinstance(names, ast.Tuple | ast.List)
            else re.split(r",\s*", text_of(names))
        )
        for row in getattr(rows, "elts", []) if name in columns else []:
            values = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [row])
            yield values[columns.index(name)] if len(columns) > 1 else values[0] if isinstance(row, ast.Call) else row


def expected(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what tests expect of a message: in ``match=``, ``"..." in str(error.value)`` and of what is printed."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            found: list[ast.AST] = []
            if isinstance(node, ast.Call):
                found = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
                    found += node.args if TOLD.search(ast.unparse(node.func.value)) else []
            elif isinstance(node, ast.Compare) and TOLD.search(" ".join(map(ast.unparse, node.comparators))):
                found = [node.left]
            for value in found:
                yield from parametrized(function, value.id) if isinstance(value, ast.Name) else [value]


def sentences(file: Path) -> Iterator[str]:
    for node in expected(ast.parse(file.read_text(encoding="utf-8"))):
        if found := SENTENCE.search(text_of(node)):
            yield f"{file.relative_to(HERE)}:{node.lineno}: {found[0]}"  # type: ignore[attr-defined]


def test_errors_are_known_by_type_and_setting() -> None:
    assert sorted({line for file in HERE.rglob("*.py") for line in sentences(file)}) == []
