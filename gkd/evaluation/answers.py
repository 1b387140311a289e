"""``answers.jsonl``: every answer as it came, so that an evaluation that ended early generates only what is missing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gkd.config.output_files import read_whole_lines
from gkd.durable import compute_checksum, hold
from gkd.errors import ConfigError
from gkd.observability.metrics import JsonLines


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
        self.path, self._open = path, ExitStack()
        try:
            held = self._open.enter_context(path.open("ab"))
        except OSError as error:
            raise ConfigError(f"evaluate.output_dir: {path} cannot be written: {error.strerror}") from None
        if not hold(held.fileno()):
            self.close()
            raise ConfigError(f"evaluate.output_dir: another evaluation is writing {path} now")
        key, answer = AnswerKey.__dataclass_fields__, RecordedAnswer.__dataclass_fields__
        try:
            rows = read_whole_lines(path, **dict.fromkeys((*key, *answer), object))
        except ConfigError as error:
            raise ConfigError(f"{error}: it is no answer of gkd evaluate, so move the file away") from None
        self.answers = {
            AnswerKey(**{name: row[name] for name in key}): RecordedAnswer(**{name: row[name] for name in answer})
            for row in rows
        }
        self._lines = self._open.enter_context(JsonLines(path))

    def add(self, key: AnswerKey, answered: RecordedAnswer, beside: Mapping[str, Any]) -> None:
        """Append an answer; it is in the file when this returns. ``beside``: what else its line holds.

        Raises OSError, which names the file.
        """
        self._lines.write({**asdict(key), **beside, **asdict(answered)})
        self.answers[key] = answered

    def close(self) -> None:
        """Close the file, after which another program may write it."""
        self._open.close()


def fingerprint(directory: str) -> str:
    """Return 16 hexadecimal digits of what a model's directory holds: configuration, tokenizer and weights.

    Every byte is read, as a model that was trained further has files of the same names and sizes.
    """
    files = sorted(p for p in Path(directory).iterdir() if p.suffix in (".safetensors", ".json", ".model", ".jinja"))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(compute_checksum, files))
    named = [[file.name, checksum.sha256] for file, checksum in zip(files, sums, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
