"""The accuracy reward: which responses count as right."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.rewards.accuracy import agreement as accuracy
from gkd.rewards.math_equality import MathJudge

GSM8K = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = 72.\n#### 72"


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        # equal but for white space; a list of numbers is right only as a whole
        ("1 1 2 3", "1 1 2 3", True),
        (" 1 1  2 3\n", "1 1 2 3", True),
        ("1 1 2 4", "1 1 2 3", False),
        ("3", "1 1 2 3", False),
        ("1 1 2", "1 1 2 3", False),
        ("", "1 1 2 3", False),
        ("", "", True),
        # prose agrees by its text only
        ("Paris", "Paris", True),
        ("London", "Paris", False),
        ("there were 3", "they had 3", False),
        # GSM8K's marker
        ("so it is\n#### 72", GSM8K, True),
        ("#### 72", GSM8K, True),
        ("#### 72.0", GSM8K, True),
        ("#### $72.", GSM8K, True),
        ("#### 72 clips", GSM8K, True),
        ("#### 71\n#### 72", GSM8K, True),
        ("#### 72\n#### 71", GSM8K, False),
        ("72 #### 71", GSM8K, False),
        ("#### ", GSM8K, False),
        ("72 and no marker", GSM8K, True),
        ("first 72 and then 71", GSM8K, False),
        ("it is \\boxed{72} of 100", GSM8K, True),
        ("it is \\boxed{7{2} of 10", GSM8K, False),
        ("no number", GSM8K, False),
        ("#### 1000", "#### 1,000", True),
        ("#### -5", "#### 5", False),
        # mathematics
        ("0.5", "1/2", True),
        ("$\\frac{1}{2}$", "0.5", True),
        ("so it is \\boxed{\\frac{3}{4}}", "0.75", True),
        ("$x^2-1$", "$(x-1)(x+1)$", True),
        ("2^{1/2}", "\\sqrt{2}", True),
        ("$\\sqrt{3}$", "\\sqrt{2}", False),
        ("the answer is 12", "12", True),
        ("the answer is 13", "12", False),
        ("x", "12", False),
    ],
)
def test_accuracy(response: str, answer: str, right: bool) -> None:
    assert accuracy(response, answer) == float(right)


def test_works_off_the_main_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(accuracy("$\\frac{1}{2}$", "0.5")))
    thread.start()
    thread.join(60)
    assert found == [1.0]


def test_an_expression_that_would_never_end_is_wrong_and_the_next_one_is_still_judged() -> None:
    judge = MathJudge(seconds=0.5)
    try:
        assert judge.equal("1/2", "0.5")
        assert not judge.equal("$2^{2^{2^{2^{2^2}}}}$", "3")
        assert judge.equal("1/2", "0.5")
    finally:
        judge.close()


def test_closing_leaves_no_child() -> None:
    judge = MathJudge()
    judge.equal("1", "1")
    child = judge._child
    assert isinstance(child, subprocess.Popen)
    judge.close()
    assert child.poll() is not None


def test_very_long_responses_take_no_time() -> None:
    began = time.monotonic()
    assert accuracy("9" * 2_000_000, "#### 7") == 0.0
    assert accuracy("\\boxed{" * 300_000, "#### 7") == 0.0
    assert accuracy("(" * 2_000_000, "0.5") == 0.0
    assert time.monotonic() - began < 20


@settings(max_examples=60, deadline=None)
@given(response=st.text(alphabet=st.characters()), answer=st.text(alphabet=st.characters()))
def test_odd_texts_never_raise(response: str, answer: str) -> None:
    assert accuracy(response, answer) in (0.0, 1.0)
    assert accuracy(response, "#### " + answer) in (0.0, 1.0)
