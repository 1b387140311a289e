"""The reward that a reference answer decides: 1 for a right response, 0 for a wrong one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from gkd.rewards.answers import (
    Numeral,
    find_only_number,
    find_stated,
    last_formula,
    last_line,
    last_number,
    readings,
    with_opened_reasoning,
)
from gkd.rewards.comparison import (
    FUNCTIONS,
    choice,
    find_compound,
    is_formula,
    is_same_answer,
    normalize_text,
    number_of,
    strip_markup,
)
from gkd.rewards.completion import Completion, RewardFunction
from gkd.rewards.quantity import SCALES, Quantity, quantity

_FULL_WIDTH = {0xFEE0 + ord(character): character for character in "0123456789+-./=%"}
"""Digits and signs as Chinese and Japanese texts may have them, and what they stand for."""


_SCALE = re.compile(r"\s*(?:°|\^?\{?\\circ\}?|\\degree)\s*[CFK](?![a-zA-Z])")
"""After a number, of a temperature."""


class Accuracy(RewardFunction):
    """Gives 1.0 to a response that gives the reference answer, else 0.0; see :func:`agreement`."""

    needs_answer: ClassVar[bool] = True

    def __call__(self, completion: Completion) -> float:
        """Return 1.0 or 0.0. Raises ValueError where there is no reference answer."""
        return accuracy(completion)


def accuracy(completion: Completion) -> float:
    """Return 1.0 when the response gives a reference answer, else 0.0; see :func:`agreement`."""
    if completion.answer is None:
        raise ValueError("there is no reference answer")
    response = with_opened_reasoning(completion.prompt, completion.response)
    return any_agreement(response, (completion.answer, *completion.other_answers))


def any_agreement(response: str, answers: Sequence[str]) -> float:
    """Return 1.0 when ``response`` gives one of ``answers``, else 0.0; see :func:`agreement`."""
    return max((agreement(response, answer) for answer in answers), default=0.0)


def agreement(response: str, answer: str) -> float:
    r"""Return 1.0 when ``response`` gives ``answer``, else 0.0. Never raises, whatever the texts hold.

    They agree when they are equal but for white space. Else the final answer is taken out of both: what stands last
    in ``<answer>`` tags, in a ``\boxed{}``, after ``####``, in a field ``"answer"`` of JSON or in a sentence such as
    "the answer is ...". A reference that states none is the answer itself; of a response its last line counts, or its
    last number where the reference is a number, or its last formula where it is one. Two answers agree as text, as
    choices (``(B)``), as numbers, element by element as lists, or in mathematics, which math-verify decides.

    This is stricter than math-verify alone, and than the rewards of TRL and verl with it: to these, units count for
    nothing, every list is a set, "72 million" is 72, and some forms count although another answer follows. It accepts
    more than they do, and than verl's rewards for GSM8K and MATH, which compare strings after one marker: every form
    counts, and words and choices do. Here a number without a unit agrees with one that has one, and 50% with 50 and
    0.5; lists in brackets are in order, as is ``5, 6`` beside ``x=5, y=6``; ``5, 6`` and ``\{5, 6\}`` are in none. Of
    several boxes the last counts, unless only a comma, "and" or "or" is between them: they are a list.
    """
    response, answer = response.translate(_FULL_WIDTH), answer.translate(_FULL_WIDTH)
    if " ".join(response.split()) == " ".join(answer.split()):
        return 1.0
    reference = find_stated(answer)
    expected = answer if reference is None else reference.content
    if reference is not None and reference.parts and _is_each(reference.parts, reference.parts[-1]):
        expected = reference.parts[-1]
    if not normalize_text(expected):
        return 0.0
    stated = find_stated(response, lambda content: _is_plausible(content, expected))
    if stated is None:
        candidates = _guess_answers(response, expected)
    else:
        candidates = [*readings(stated), *_find_number(stated.content, expected)]
        if stated.parts and _is_each(stated.parts, expected):
            return 1.0
    return float(any(is_same_answer(candidate, expected) for candidate in candidates))


def _is_each(parts: Sequence[str], expected: str) -> bool:
    """Return whether several boxes write one answer, each in its way."""
    return all(is_same_answer(part, expected) for part in parts)


def _is_plausible(content: str, expected: str) -> bool:
    """Return whether a sentence's end may be the answer: a letter, number or formula does not begin with a word."""
    normalized = normalize_text(expected)
    if find_compound(expected) is not None:
        return re.match(r"(?:[a-zA-Z]+\s*=)?[\s(\[]*(?:[A-Z][a-z]?\d*){2}", normalize_text(content)) is not None
    option = choice(normalized)
    words = option[1] if option else not (number_of(normalized) or is_formula(strip_markup(expected)))
    first = re.match(r"(?!(?i:option|choice)\s)[a-zA-Z]{2,}", normalize_text(content))
    return bool(words) or first is None or first[0].lower() in {*FUNCTIONS, "pi"}


def _guess_answers(response: str, expected: str) -> list[str]:
    """Return what may be the answer of a response that marks none."""
    normalized = normalize_text(expected)
    number = number_of(normalized)
    numbers = _with_unit(last_number(response), number) if number else []
    if quantity(normalized):
        return numbers
    is_formal = is_formula(strip_markup(expected)) or find_compound(expected) is not None
    formula = last_formula(response) if is_formal else None
    return [*numbers, last_line(response)] if formula is None else [*numbers, last_line(response), formula]


def _find_number(stated: str, expected: str) -> list[str]:
    """Return the number in an answer such as "she sold 72 clips", which holds no other."""
    number = number_of(normalize_text(expected))
    return [] if number is None else _with_unit(find_only_number(stated), number)


def _with_unit(numeral: Numeral | None, number: Quantity) -> list[str]:
    """Return a number and what follows it, as far as it belongs to the number."""
    if numeral is None:
        return []
    if degrees := _SCALE.match(numeral.after):
        return [numeral.text + degrees[0]]
    words = re.match(r"(?:\s*[a-zA-Z/]+(?:[²³]|\^\{?[23]\}?)?){0,4}", numeral.after)
    unit = words[0].split() if words else []
    belongs = number.unit or (unit and unit[0].lower() in SCALES)
    return [f"{numeral.text} {' '.join(unit)}" if belongs else numeral.text]
