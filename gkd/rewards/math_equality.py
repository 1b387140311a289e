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
import signal
import subprocess
import sys
import threading

SECONDS_PER_QUESTION = 3.0  # of processor time
SECONDS_OF_WAITING = 60.0  # by the clock, for a child that is stopped or gets no processor
MEMORY_LIMIT = 4 << 30  # bytes of address space
MAX_LENGTH = 2000  # characters looked at, from the end of each text

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
            child = self._running_child()
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

    def _running_child(self) -> subprocess.Popen[str]:
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


def _compare(response: str, answer: str) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # As LaTeX only: of what it cannot read whole it would else take a number. Without its units, as a last "h" or "ab"
    # is one to it. The alarm of main() is the time-out; math-verify's own works in the main thread of a process only.
    form = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True)
    )
    own, gold = (
        parse(f"${text.strip('$')}$", [form], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (response, answer)
    )
    return bool(gold) and bool(verify(gold, own, timeout_seconds=None))


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
