"""The accuracy reward: which responses count as right."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import verify

from gkd.rewards.accuracy import agreement as accuracy
from gkd.rewards.math_equality import MathComparer, _compare
from tests.e2e.rewards.answers_in_formulas import COMPLEX, MATH, MATHEMATICS, NEARLY_EQUAL, NOTATION, RELATIONS
from tests.e2e.rewards.answers_in_text import (
    AFTER_A_MARKER,
    CHOICES,
    GSM8K,
    JOINED,
    LISTS,
    NUMBERS,
    TEXT,
    WITHOUT_SPACES,
)

TABLES = [
    TEXT, AFTER_A_MARKER, NUMBERS, CHOICES, LISTS, JOINED, WITHOUT_SPACES, MATHEMATICS, COMPLEX, NEARLY_EQUAL,
    RELATIONS, NOTATION,
]  # fmt: skip


@pytest.mark.parametrize("cases", TABLES)
def test_accuracy(cases: list[tuple[str, str, bool]]) -> None:
    wrong = [(response, answer) for response, answer, right in cases if accuracy(response, answer) != float(right)]
    assert not wrong


@pytest.mark.parametrize("cases", TABLES)
def test_every_reference_is_right_as_its_own_response(cases: list[tuple[str, str, bool]]) -> None:
    """Also where it is stated in another form than the reference."""
    for answer in {answer for _, answer, _ in cases} - {"", GSM8K, MATH}:
        stated = answer.removeprefix("#### ").removeprefix("<answer>").removesuffix("</answer>")
        for response in (
            f"#### {stated}",
            f"So \\boxed{{{stated}}}.",
            f"<answer>{stated}</answer>",
            f"Answer: {stated}",
        ):
            assert accuracy(response, answer) == 1.0, (response, answer)


@pytest.mark.parametrize(
    "form",
    [
        "\\frac{{{n}+\\sqrt{{{n}}}}}{{7}}",
        "x^{{{n}}}-{n}",
        "y={n}x+\\sqrt{{3}}",
        "x^2+y^2={n}",
        "f(x)={n}x",
        "x \\le {n}",
        "(0,1)\\cup(2,{n})",
        "{n}\\pm\\sqrt{{{n}}}",
        "\\begin{{pmatrix}}1&2\\\\3&\\sqrt{{{n}}}\\end{{pmatrix}}",
    ],
)
def test_answers_of_other_numbers_need_no_proof(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 64 different answers to a question are compared in 2,016 pairs, and a proof takes a tenth of a second."""
    proofs: list[object] = []

    def prove(gold: object, own: object, **settings: object) -> bool:
        proofs.append(gold)
        return verify(gold, own, **settings)

    monkeypatch.setattr("math_verify.verify", prove)
    answers = [form.format(n=n) for n in range(3, 9)]
    assert not any(_compare(own, reference) for own, reference in combinations(answers, 2))
    assert not proofs
    assert _compare(answers[0], form.format(n="3 ")) and len(proofs) == 1


def test_works_off_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(accuracy, "$\\frac{1}{2}$", "0.5").result(60) == 1.0


def test_an_expression_that_would_never_end_is_wrong_and_the_next_one_is_still_compared() -> None:
    comparer = MathComparer(seconds=0.5)
    try:
        assert comparer.are_equal("1/2", "0.5")
        assert not comparer.are_equal("$2^{2^{2^{2^{2^2}}}}$", "3")
        assert comparer.are_equal("1/2", "0.5")
    finally:
        comparer.close()


def test_a_child_that_ended_between_questions_costs_no_answer() -> None:
    comparer = MathComparer()
    try:
        assert comparer.are_equal("1/2", "0.5")
        for _ in range(2):
            assert comparer._child is not None
            comparer._child.kill()
            comparer._child.wait()
            assert comparer.are_equal("1/2", "0.5")
    finally:
        comparer.close()


def test_closing_leaves_no_child() -> None:
    comparer = MathComparer()
    comparer.are_equal("1", "1")
    child = comparer._child
    assert isinstance(child, subprocess.Popen)
    comparer.close()
    assert child.poll() is not None


def test_very_long_responses_are_answered() -> None:
    assert accuracy("9" * 2_000_000, "#### 7") == 0.0
    assert accuracy("\\boxed{" * 300_000, "#### 7") == 0.0
    assert accuracy("(" * 2_000_000, "0.5") == 0.0
    assert accuracy(f"The answer is $5$ {'a' * 15_000}1", "5") == 0.0
    for text in ("\\[ ", "answer is ( (", "<answer>", "1,", "the answer is: the ", "\\frac{1}{", "answer to ", "1/"):
        for answer in ("7", "Paris", "B", "5, 6", "\\sqrt{2}"):
            assert accuracy(text * 10_000, answer) == 0.0


@pytest.mark.parametrize("space", [" ", "\t", "\n"])
def test_a_long_run_of_white_space_in_an_answer_costs_no_time(space: str) -> None:
    began = time.process_time()
    assert accuracy(f"<answer>x{space * 19_000}x</answer>", "5") == 0.0
    assert accuracy(f"\\boxed{{5{space * 19_000}, since 2 + 3 is that}}", "5") == 1.0
    assert time.process_time() - began < 2.0


def test_a_unit_or_word_that_is_repeated_up_to_the_limit_costs_no_time() -> None:
    began = time.process_time()
    assert accuracy("The answer is $6" + 22 * " \\text{ m}" + " \\text{ m", "5") == 0.0
    assert accuracy("\\boxed{6}, " + 22 * "or " + "x \\boxed{5}", "5") == 1.0
    assert time.process_time() - began < 2.0


@settings(max_examples=60)
@given(response=st.text(alphabet=st.characters()), answer=st.text(alphabet=st.characters()))
def test_odd_texts_never_raise(response: str, answer: str) -> None:
    assert accuracy(response, answer) in (0.0, 1.0)
    assert accuracy(response, "#### " + answer) in (0.0, 1.0)
