"""Tests name what an error is about, and tests/messages.txt alone says in which words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
MOST = 2  # words in a row; more are a sentence, which may change while the behaviour does not
WORD = r"(?:a|[A-Z][a-z]+|[a-z]{2,})"
SENTENCE = re.compile(rf"(?<![\w./=\\-])(?!a(?: a)+\b){WORD}(?: {WORD}){{{MOST},}}(?![\w./=\[-])")

TOLD = re.compile(
    r"\bstr\(|\.(out|err|stdout|stderr|text|shortage|note|found)\b|\bmessages?\b|getMessage|getvalue|\[.text.\]"
)
"""What a user reads."""
ERROR = re.compile(r"\bstr\(\w+(\.value)?\)|\.(err|stderr)\b|\.exception\(|getMessage")  # the text of an error


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


def mentions(node: ast.AST, names: set[str], text: re.Pattern[str] = ERROR) -> bool:
    """Return whether an expression has such a text: by itself, or as one of ``names``."""
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return bool(used & names or text.search(ast.unparse(node)))


def held(nodes: Sequence[ast.AST], names: set[str], text: re.Pattern[str] = ERROR) -> set[str]:
    """Return ``names`` with those that a function of these nodes gives to such a text."""
    names = set(names)
    for node in nodes:
        if isinstance(node, ast.Assign) and mentions(node.value, names, text):
            targets = [part for target in node.targets for part in ast.walk(target)]
            names |= {part.id for part in targets if isinstance(part, ast.Name)}
    return names


def told_by(functions: Mapping[ast.FunctionDef, Sequence[ast.AST]]) -> set[str]:
    """Return the file's own functions that return the text of an error."""
    names: set[str] = set()
    for function, nodes in functions.items():
        if not function.name.startswith("test_"):
            returned = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
            if any(mentions(value, held(nodes, set())) for value in returned):
                names.add(function.name)
    return names


def literals(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the strings of an expectation, which may be one of several, or put together."""
    if isinstance(node, ast.BinOp | ast.Tuple | ast.List | ast.Set | ast.IfExp | ast.Dict):
        for part in ast.iter_child_nodes(node):
            yield from literals(part)
    else:
        yield node


def expected(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what tests expect of a message: in ``match=``, beside it in a comparison, and how it begins."""
    functions = {one: list(ast.walk(one)) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    by_functions = told_by(functions)
    for function, nodes in functions.items():
        text_names = held(nodes, by_functions, TOLD)
        for node in nodes:
            expressions: list[ast.AST] = []
            if isinstance(node, ast.Call):
                expressions = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
                expressions += node.args[1:] if ast.unparse(node.func) == "contains_in_order" else []
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
                    expressions += node.args if mentions(node.func.value, text_names, TOLD) else []
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                expressions = sides if any(mentions(side, text_names, TOLD) for side in sides) else []
            for value in (literal for one in expressions for literal in literals(one)):
                yield from parametrized(function, value.id) if isinstance(value, ast.Name) else [value]


def sentences(file: Path) -> Iterator[str]:
    """Yield the sentences that the tests of a file expect, and where."""
    for node in expected(ast.parse(file.read_text(encoding="utf-8"))):
        if match := SENTENCE.search(text_of(node)):
            yield f"{file.relative_to(HERE)}:{node.lineno}: {match[0]}"  # type: ignore[attr-defined]


SEEN = """
def complaint():
    text = str(caught.value)
    return text.strip()

def test():
    with raises(match="one of these words"): pass
    assert "two of these words" in str(caught.value)
    assert str(caught.value) == f"three of these words, {number}"
    text = capsys.readouterr().err
    assert text == ("four of these words" if more else "five of these words")
    assert complaint().startswith("six of these words")
    assert contains_in_order(text, "seven of these words")
    with raises(match="No word of these"): pass
    printed = capsys.readouterr().out
    assert "eight of these words" in printed
    assert any("nine of these words" in row["text"] for row in rows)
    assert prompt == "ten of these words"
"""


def test_whatever_an_error_is_compared_with_is_seen() -> None:
    words = {text_of(node).split()[0] for node in expected(ast.parse(SEEN)) if SENTENCE.search(text_of(node))}
    assert words == {"one", "two", "three", "four", "five", "six", "seven", "No", "eight", "nine"}


def test_errors_are_known_by_type_and_setting() -> None:
    assert sorted({line for file in HERE.rglob("*.py") for line in sentences(file)}) == []
