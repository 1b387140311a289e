"""Models compared on the questions that they both answered, set by set, against the one that is named first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gkd.errors import ConfigError
from gkd.evaluation.paired import Paired, compare_paired, holm
from gkd.evaluation.results import Results, read_results


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on one set. ``holm_p``: ``paired.p`` corrected for all comparisons made together."""

    set: str
    score: str
    first: str
    second: str
    values: tuple[float, float]
    paired: Paired
    holm_p: float
    n_left_out: int
    """Questions that only one of both answered."""


def read_all(paths: Sequence[Path]) -> list[Results]:
    """Read files of results, all of them of a directory, run, evaluation or sweep. Raises ConfigError for none.

    Models of one name and set in two directories, as those of runs ``a/seed0`` and ``b/seed0``, get the name of the
    directory above too.
    """
    files = [(file, read_results(file)) for path in paths for file in _files(path)]
    homes: dict[tuple[str, str], set[Path]] = {}
    for file, result in files:
        homes.setdefault((result.set, result.model), set()).add(file.absolute().parent)
    twice = {model for (_, model), directories in homes.items() if len(directories) > 1}
    return [
        replace(result, model=f"{_above(file)}/{result.model}") if result.model in twice else result
        for file, result in files
    ]


def _above(file: Path) -> str:
    """Return the name of the directory that holds a run, or an evaluation, with this file of results."""
    home = file.absolute().parent
    return (home.parent.parent if home.name == "results" else home).name


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if files := sorted((path / "results").glob("*.json")):
        return files
    if (path / "config.yaml").exists():
        raise ConfigError(f"{path} is a run without results/: it has not ended, or could measure no scores")
    files = sorted(path.glob("*.json")) or sorted(path.glob("*/results/*.json"))
    if not files:
        raise ConfigError(f"{path} holds no files of results (MODEL_SET_N.json)")
    return files


def compare_all(results: Sequence[Results], score: str = "accuracy", baseline: str | None = None) -> list[Comparison]:
    """Compare every model with ``baseline``, by default the first, on each set that both have.

    Raises ConfigError where nothing can be compared: no second model, no set or no question in common, or no such
    score.
    """
    names = list(dict.fromkeys(result.name for result in results))
    first = names[0] if baseline is None else baseline
    if first not in names:
        raise ConfigError(f"--baseline {first}: there are results of {', '.join(names)}")
    if len(names) < 2:
        raise ConfigError(f"there are results of {first} alone: name files of two models (or of two strategies)")
    by_place: dict[tuple[str, str], Results] = {}
    for result in results:
        place = (result.set, result.name)
        if place in by_place:
            raise ConfigError(f"two files hold results of {result.name} on {result.set}: name one of them")
        by_place[place] = result
    rows = [
        _compare(by_place[one, first], result, score)
        for (one, name), result in by_place.items()
        if name != first and (one, first) in by_place
    ]
    if not rows:
        raise ConfigError(f"no other model has results on a set of {first}: a comparison needs the same questions")
    corrected = holm([row.paired.p for row in rows])
    return [replace(row, holm_p=p) for row, p in zip(rows, corrected, strict=True)]


def _compare(first: Results, second: Results, score: str) -> Comparison:
    for result in (first, second):
        if score not in result.scores:
            raise ConfigError(
                f"--score {score}: {result.name} on {result.set} has {', '.join(result.scores) or 'no scores'}"
            )
    common = [key for key, own in first.questions.items() if score in own and score in second.questions.get(key, {})]
    if len(common) < 2:
        raise ConfigError(
            f"{first.name} and {second.name} have {len(common)} questions of {first.set} with {score} in common: a "
            "comparison needs two or more"
        )
    values = [[result.questions[key][score] for key in common] for result in (first, second)]
    paired = compare_paired(*values)
    means = (sum(values[0]) / len(common), sum(values[1]) / len(common))
    n_left_out = len(first.questions.keys() | second.questions.keys()) - len(common)
    return Comparison(first.set, score, first.name, second.name, means, paired, paired.p, n_left_out)
