"""Whether two answers are the same in mathematics, by math-verify in a process that can be killed.

A sampled response may hold ``2^{2^{2^{2^{2^2}}}}`` or ``9999999!``. sympy then computes for ever inside one C call,
which neither a thread nor a signal handler interrupts and which would hold the whole run. So math-verify lives in a
child that sets itself an alarm for every question: late, the kernel ends it, the answer counts as unequal, and the next
question starts a new child. The alarm counts the child's own processor time, so that a busy machine changes no result.
The child also ends when this process does, because its stdin closes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SECONDS_PER_QUESTION = 3.0  # of processor time
SECONDS_OF_WAITING = 60.0  # by the clock, for a child that is stopped or gets no processor
MEMORY_LIMIT = 4 << 30  # bytes of address space
MAX_LENGTH = 2000  # characters looked at, from the end of each text
MOST_APART = 1e-4  # of the larger: two numbers that are further apart are different, whatever math-verify rounds
MOST_ROOTS = 20  # of an equation's; those of degree 60 take seconds
SMALLEST = 1e-90  # what sympy leaves of a number that is 0

log = logging.getLogger(__name__)


class MathComparer:
    """A child process that compares answers; started at the first question, safe to use from several threads."""

    def __init__(self, seconds: float = SECONDS_PER_QUESTION) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def are_equal(self, response: str, answer: str) -> bool:
        """Return whether two expressions, in LaTeX or plain, are equal. False when in doubt."""
        question = json.dumps([response[-MAX_LENGTH:], answer[-MAX_LENGTH:]])
        with self._lock:
            child = self._ensure_child()
            assert child.stdin is not None and child.stdout is not None
            timer = threading.Timer(SECONDS_OF_WAITING, child.kill)
            timer.start()
            try:
                child.stdin.write(question + "\n")
                child.stdin.flush()
                reply = child.stdout.readline().strip()
            except BrokenPipeError:
                reply = ""
            finally:
                timer.cancel()
            if reply not in ("0", "1"):
                log.warning("math-verify gave no verdict in %.1f s, counted as wrong: %.80r", self._seconds, response)
                self._end_child()
        return reply == "1"

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            self._end_child()

    def _ensure_child(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is not None:  # ended while it had nothing to do
            self._end_child()
        if self._child is None:
            # Run as a file: a Ray worker's import path does not reach its children.
            self._child = subprocess.Popen(
                [sys.executable, __file__, str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()
            with contextlib.suppress(BrokenPipeError), child:  # closes its pipes, of which one may hold a question
                pass


_comparer = MathComparer()
atexit.register(_comparer.close)


def are_math_equal(response: str, answer: str) -> bool:
    """Return whether two answers are mathematically equal, by this process's :class:`MathComparer`."""
    return _comparer.are_equal(response, answer)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an answer, where each of its variables stands for one: equal answers have equal ones.

    ``kind``: answers of two kinds are not compared. The numbers are in order, or else a set of them.
    """

    kind: str
    values: list[Any]
    in_order: bool = True

    def differ(self, other: Numbers) -> bool:
        """Return whether they show that the answers are different."""
        if self.kind != other.kind:
            return False
        if self.in_order:
            return any(map(_are_apart, self.values, other.values))
        pairs = ((self.values, other.values), (other.values, self.values))
        return any(all(_are_apart(a, b) for b in others) for values, others in pairs for a in values)


def _are_apart(a: Any, b: Any) -> bool:
    """Return whether two numbers differ, and not only by rounding."""
    largest = max(abs(a), abs(b))
    return bool(largest > SMALLEST and abs(a - b) > MOST_APART * largest)


@lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """Return what math-verify makes of an answer."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # As LaTeX only: of what it cannot read whole it would else take a number. Without its units, as a last "h" or "ab"
    # is one to it. The alarm of main() is the time-out; math-verify's own works in the main thread of a process only.
    form = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True)
    )
    parsed = parse(f"${text.strip('$')}$", [form], fallback_mode="no_fallback", parsing_timeout=None)
    if parsed and re.search(r"\bor\b", text):
        with contextlib.suppress(Exception):  # sympy raises what it meets
            return [_unite(parsed[0]), *parsed[1:]]
    return list(parsed)


@lru_cache(maxsize=4096)
def _read(text: str, is_complex: bool) -> tuple[list[Any], Numbers | None]:
    """Return what an answer is, with ``i`` as the imaginary unit where it ``is_complex``, and its numbers, if any."""
    parsed = _parse(text)
    if not parsed:
        return [], None
    with contextlib.suppress(Exception):  # sympy raises what it meets, as where an order of complex numbers is asked
        parsed = [_with_one_i(part, is_complex) for part in parsed]
    try:
        return parsed, _numbers_of(parsed[0])
    except Exception:  # also of what is no number
        return parsed, None


def _may_be_complex(text: str) -> bool:
    """Return whether an answer has no variable but ``i``: a number, a set of them, or a matrix."""
    from sympy import Expr, FiniteSet, MatrixBase, Tuple

    answer: Any = next(iter(_parse(text)), None)
    is_value = isinstance(answer, Expr | FiniteSet | MatrixBase | Tuple)
    return is_value and {symbol.name for symbol in answer.free_symbols} <= {"i"}


def _with_one_i(answer: Any, is_complex: bool) -> Any:
    """Return a parsed answer with the imaginary unit for every ``i`` where it ``is_complex``, else with one variable.

    To math-verify ``i`` is never that unit; and where one stands alone, and not after a digit, no variable is real,
    which makes each another one.
    """
    from sympy import I, Symbol

    symbols = getattr(answer, "free_symbols", ())
    if all(symbol.name != "i" for symbol in symbols):
        return answer
    return answer.xreplace({symbol: I if is_complex else Symbol(symbol.name, real=True) for symbol in symbols})


def _unite(answer: Any) -> Any:
    """Return the set of the numbers for which one of several inequalities holds; anything else as it is."""
    from sympy import FiniteSet, Union
    from sympy.core.relational import Relational

    if isinstance(answer, FiniteSet) and all(isinstance(part, Relational) for part in answer.args):
        return Union(*(part.as_set() for part in answer.args))
    return answer


def _numbers_of(answer: Any) -> Numbers | None:
    """Return the value of an expression, elements of a matrix, ends of a set, or where both sides of a relation meet.

    Raises anything where there are none.
    """
    from sympy import And, Derivative, Eq, Expr, MatrixBase, Rational, Set, Symbol, UnevaluatedExpr
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    if isinstance(answer, Symbol) or answer.has(ExprWithLimits, Derivative, UnevaluatedExpr):
        return None  # names may be words; sums and integrals take long; math-verify has rules of its own for percents
    answer = answer.xreplace({f: Symbol(str(f), real=True) for f in answer.atoms(AppliedUndef)})
    symbols = sorted(answer.free_symbols, key=str)
    places = {s: Rational(zlib.crc32(s.name.encode()) % 99_991, 99_991) + Rational(1, 2) for s in symbols}
    if isinstance(answer, Expr):
        return Numbers("expression", [_number(answer.evalf(15, subs=places))])
    if isinstance(answer, MatrixBase):
        return Numbers(f"matrix {answer.shape}", [_number(part.evalf(15, subs=places)) for part in answer.flat()])
    if isinstance(answer, Set):
        ends = answer.doit().boundary.args
        return Numbers("set", [_number(end.evalf(15, subs=places)) for end in ends], in_order=False)
    relations = [answer] if isinstance(answer, Relational) else answer.args if isinstance(answer, And) else []
    if not relations or (len(relations) > 1 and any(isinstance(part, Eq) for part in relations)):
        return None
    variable = symbols[0]
    places.pop(variable)
    roots = [root for part in relations for root in _roots(part.lhs - part.rhs, variable, places)]
    return Numbers(f"relation of {variable}", roots, in_order=False)


def _roots(expression: Any, variable: Any, places: dict[Any, Any]) -> list[Any]:
    """Return the real numbers for ``variable`` at which a rational ``expression`` is 0. Raises anything for others."""
    from sympy import Poly, cancel, re

    numerator = cancel(expression.xreplace(places)).as_numer_denom()[0]
    polynomial = Poly(numerator, variable)
    if not 0 < polynomial.degree() <= MOST_ROOTS:
        raise ValueError("it does not depend on the variable, or has many roots")
    coefficients = [_number(coefficient.evalf(15)) for coefficient in polynomial.all_coeffs()]
    roots = Poly(coefficients, variable).nroots()
    return [re(root) for root in roots if not _are_apart(root, re(root))]


def _number(value: Any) -> Any:
    """Return a number of sympy's. Raises ValueError or TypeError for anything else."""
    if not (value.is_number and value.is_finite):
        raise ValueError(f"{value} is no number")
    complex(value)  # raises TypeError for what has no value, such as an unevaluated remainder
    return value


def _compare(response: str, answer: str) -> bool:
    from math_verify import verify

    is_complex = _may_be_complex(response) and _may_be_complex(answer)
    (candidate, numbers), (gold, expected) = _read(response, is_complex), _read(answer, is_complex)
    # Numbers that differ save a proof, which takes sympy a tenth of a second; and math-verify rounds small ones to 0.
    if numbers and expected and numbers.differ(expected):
        return False
    if not (gold and verify(gold, candidate, allow_set_relation_comp=True, timeout_seconds=None)):
        return False
    if type(candidate[0]) is not type(gold[0]) or (expected and expected.values):
        return True
    return _have_same_sides(candidate[0], gold[0]) or not _states_nothing(gold[0])


def _states_nothing(answer: Any) -> bool:
    """Return whether an answer is an equation that nothing solves, or everything: to math-verify all such are one."""
    from sympy import Eq, Symbol, simplify, solve
    from sympy.core.function import AppliedUndef
    from sympy.logic.boolalg import BooleanAtom

    if not isinstance(answer, Eq):
        return isinstance(answer, BooleanAtom)
    try:
        answer = answer.xreplace({f: Symbol(str(f), real=True) for f in answer.atoms(AppliedUndef)})
        return simplify(answer.lhs - answer.rhs) == 0 or not solve(answer, answer.free_symbols)
    except Exception:  # sympy raises what it meets, as of matrices and of what it cannot solve
        return True


def _have_same_sides(candidate: Any, gold: Any) -> bool:
    """Return whether two equations have the same sides, on whichever side, or are multiples of each other."""
    from math_verify import verify
    from sympy import Eq, simplify

    if not (isinstance(candidate, Eq) and isinstance(gold, Eq)):
        return False

    def is_same(one: Any, other: Any) -> bool:
        return bool(verify(one, other, timeout_seconds=None))

    sides = [(candidate.lhs, candidate.rhs), (candidate.rhs, candidate.lhs)]
    if any(is_same(gold.lhs, left) and is_same(gold.rhs, right) for left, right in sides):
        return True
    try:
        difference = gold.lhs - gold.rhs
        if not difference.free_symbols or is_same(difference, difference * 0):
            return False
        ratio = simplify(difference / (candidate.lhs - candidate.rhs))
        return bool(ratio.is_number and ratio.is_finite and ratio != 0)
    except Exception:  # of matrices
        return False


def main() -> None:
    """Answer questions, one JSON line each, until stdin closes."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process, even within a C call
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.WARNING)  # math-verify warns at every call that it has no time-out
    _compare("\\frac{1}{2}", "0.5")  # imports sympy and builds the parser, which no question should pay for
    for line in sys.stdin:
        response, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        equal = _compare(response, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(equal), flush=True)


if __name__ == "__main__":
    main()
