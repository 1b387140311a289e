"""``answers.jsonl``: every answer as it came, so that an evaluation that ended early generates only what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gkd.durable import compute_checksum, hold
from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Everything that an answer depends on: another value of any of these is another answer.

    ``fingerprint`` is that of the model's files, ``question`` the question's key, ``index`` counts the samples of it,
    ``sampling`` is a digest of the settings of sampling and of the prompt's tokens.
    """

    fingerprint: str
    set: str
    question: str
    index: int
    sampling: str
    strategy: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One line of the file, without its key.

    ``n_tokens`` were sampled for it in all; None, as the cost that depends on it, where an endpoint does not state it.
    ``truncated``: the limit cut the reply that it is, or else the last one.
    ``seconds`` since the answer before it came, so that sums are the time that was spent.
    """

    text: str
    cost: float | None
    iterations: int
    n_tokens: float | None
    truncated: bool
    seconds: float


class AnswerLog:
    """The file at ``path``, which one program at a time appends to."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises ConfigError for a file of something else, or one that another program holds."""
        self.path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"evaluate.output_dir: {path} cannot be written: {error.strerror}") from None
        if not hold(self._file.fileno()):
            self._file.close()
            raise ConfigError(f"evaluate.output_dir: another evaluation is writing {path} now")
        self.answers: dict[AnswerKey, RecordedAnswer] = {}
        self._read()

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):  # the program was killed while it wrote it
                self._file.truncate(whole)
                break
            whole += len(line)
            try:
                values = json.loads(line)
                key = AnswerKey(**{name: values[name] for name in AnswerKey.__dataclass_fields__})
                own = RecordedAnswer(**{name: values[name] for name in RecordedAnswer.__dataclass_fields__})
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(
                    f"{self.path} line {number} is no answer of gkd evaluate: move the file away"
                ) from None
            self.answers[key] = own

    def add(self, key: AnswerKey, answered: RecordedAnswer, beside: Mapping[str, Any]) -> None:
        """Append an answer; it is in the file when this returns. ``beside``: what else its line holds.

        Raises OSError, which names the file.
        """
        line = json.dumps({**asdict(key), **beside, **asdict(answered)})
        try:
            self._file.write(f"{line}\n".encode())
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.answers[key] = answered

    def close(self) -> None:
        """Close the file, after which another program may write it."""
        with contextlib.suppress(OSError):  # what could not be written was warned of, and all else is
            self._file.close()


def fingerprint(directory: str) -> str:
    """Return 16 hexadecimal digits of what a model's directory holds: configuration, tokenizer and weights.

    Every byte is read, as a model that was trained further has files of the same names and sizes.
    """
    from concurrent.futures import ThreadPoolExecutor

    files = sorted(p for p in Path(directory).iterdir() if p.suffix in (".safetensors", ".json", ".model", ".jinja"))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(compute_checksum, files))
    named = [[file.name, own.sha256] for file, own in zip(files, sums, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
