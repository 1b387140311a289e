"""The reward that a reference answer decides: 1 for a right response, 0 for a wrong one."""

from __future__ import annotations

import re
from decimal import Decimal

from gkd.rewards.completion import Completion
from gkd.rewards.math_equality import math_equal

MARKER = "####"  # GSM8K's, before the final answer
BOX = "\\boxed{"
TAIL = 20_000  # characters at the end of a response in which its final answer is looked for

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")


def accuracy(completion: Completion) -> float:
    """1.0 when the response gives the reference answer, else 0.0; see :func:`agreement`."""
    if completion.answer is None:
        raise ValueError("there is no reference answer")
    return agreement(completion.response, completion.answer)


def agreement(response: str, answer: str) -> float:
    """1.0 when ``response`` gives ``answer``, else 0.0. Never raises, whatever the texts hold.

    They agree when they are equal but for white space. An answer with a final-answer marker (``#### 72``) is compared
    with the response's text after its own last marker, else with its last ``\\boxed{}``, else with its last number.
    What is left is mathematics, and math-verify decides: 1/2 is 0.5.
    """
    if _squeeze(response) == _squeeze(answer):
        return 1.0
    if MARKER not in answer:
        return float(_is_mathematics(answer) and _same(response, answer))
    final = _final_answer(response[-TAIL:])
    return float(final is not None and _same(final, answer.rpartition(MARKER)[2]))


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _final_answer(response: str) -> str | None:
    """Where a response states its answer: after its marker, in its box, or its last number."""
    if MARKER in response:
        after = response.rpartition(MARKER)[2].strip()
        return after.splitlines()[0] if after else None
    boxed = _last_box(response)
    if boxed is not None:
        return boxed
    numbers = _NUMBER.findall(response)
    return numbers[-1] if numbers else None


def _last_box(text: str) -> str | None:
    start = text.rfind(BOX)
    if start < 0:
        return None
    start += len(BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _same(given: str, expected: str) -> bool:
    """Equal as text, as numbers, or, when both are not plain numbers, in mathematics."""
    if _squeeze(given) == _squeeze(expected):
        return True
    numbers = _as_number(given), _as_number(expected)
    if None not in numbers:
        return numbers[0] == numbers[1]
    # Nothing that holds neither a digit nor a command can equal an expression other than by its text.
    return bool(re.search(r"[\d\\$]", given)) and math_equal(given, expected.strip())


def _as_number(text: str) -> Decimal | None:
    """The number that ``text`` is as a whole; ``$1,000.00`` and ``72.`` are numbers, ``50%`` is not."""
    bare = text.strip().lstrip("$").rstrip(".").strip()
    return Decimal(bare.replace(",", "")) if _NUMBER.fullmatch(bare) and bare.isascii() else None


def _is_mathematics(answer: str) -> bool:
    """Whether math-verify may judge by this answer.

    It takes the last expression it finds, so to it "1 2 9" and "9" are equal, and so are two sentences that end in the
    same number. Lists of numbers and prose agree by their text only.
    """
    several_numbers = re.fullmatch(r"\s*[-\d.,]+(\s+[-\d.,]+)+\s*", answer) is not None
    return bool(re.search(r"[\d\\$]", answer)) and not several_numbers and len(_WORD.findall(answer)) <= 1
