"""The ways a program of this project ends early, and how each is told to the user: in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class ConfigError(Exception):
    """What was asked cannot run: a setting, a file, a model, or more GPUs than there are. Exit code 2."""


class RunFailed(Exception):
    """Something died, timed out or was not what it had to be: says what, where and why. Exit code 1."""


class NotUpdated(RunFailed):
    """An update of the actor that failed before anything was changed: its weights are those before it."""


class OutOfMemory(NotUpdated):
    """A batch that does not fit in micro-batches of as many tokens as they had.

    ``budget`` is what to try instead; None: one sequence alone is too much.
    """

    def __init__(self, message: str, budget: int | None = None) -> None:
        super().__init__(message)
        self.budget = budget


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, in one line, for arguments that it does not know."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def guarded(program: Callable[[], int]) -> int:
    """Call ``program`` and return its exit code; an error becomes one line on standard error and a code.

    So does a package that this Python lacks, where ``program`` imports it and not the module around it.
    """
    try:
        return program()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "gkd"):
            raise
        print(
            f"error: {sys.executable} has no package {package}: ./launch/quickstart.sh installs what is needed into "
            ".venv; then use .venv/bin/python",
            file=sys.stderr,
        )
        return 2
    except OSError as error:  # a full disk, a directory that is gone
        where = f": {error.filename}" if error.filename else ""
        print(f"failed: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
