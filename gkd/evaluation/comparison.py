"""Models compared on the questions that they both answered, set by set, against the one that is named first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gkd.config.output_files import CONFIG
from gkd.errors import ConfigError
from gkd.evaluation.paired import PairedDifference, compare_paired, holm
from gkd.evaluation.results import Results, read_results
from gkd.observability.run_files import tell_apart


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on one set. ``holm_p``: ``paired.p`` corrected for all comparisons made together."""

    set: str
    score: str
    first: str
    second: str
    values: tuple[float, float]
    paired: PairedDifference
    holm_p: float
    n_left_out: int
    """Questions that do not have the score of both."""


def read_all(paths: Sequence[Path], report: Callable[[str], object] = lambda text: None) -> list[Results]:
    """Read files of results, all of them of a directory, run, evaluation or sweep. Raises ConfigError for none.

    ``report`` is called with the line of each run of a sweep that has none.

    Of a model's results on one set in a directory those with the most questions count, as ``--quick`` leaves others.
    Models of one name and set in two directories, as those of runs ``a/seed0`` and ``b/seed0``, get the names of as
    many directories above as tell them apart.
    """
    files = [file_and_result for path in paths for file_and_result in _read_path(path, report)]
    homes: dict[tuple[str, str], set[Path]] = {}
    for file, result in files:
        homes.setdefault((result.set, result.model), set()).add(_find_home(file))
    twice = {model for (_, model), directories in homes.items() if len(directories) > 1}
    names: dict[str, dict[Path, str]] = {}
    for model in twice:
        names[model] = _name_homes(model, {_find_home(file) for file, result in files if result.model == model})
    return [
        replace(result, model=names[result.model][_find_home(file)]) if result.model in twice else result
        for file, result in files
    ]


def _read_path(path: Path, report: Callable[[str], object]) -> list[tuple[Path, Results]]:
    """Read the file at ``path``, or those of a directory, in which a quick check gives way to the whole evaluation."""
    files = [(file, read_results(file)) for file in _files(path, report)]
    if not path.is_dir():
        return files
    most: dict[tuple[Path, str, str], int] = {}
    for file, result in files:
        place = file.parent, result.set, result.name
        most[place] = max(len(result.questions), most.get(place, 0))
    return [
        (file, result) for file, result in files if len(result.questions) == most[file.parent, result.set, result.name]
    ]


def _find_home(file: Path) -> Path:
    """Return the directory of the run, or of the evaluation, that this file of results is of."""
    home = file.absolute().parent
    return home.parent if home.name == "results" else home


def _name_homes(model: str, homes: Collection[Path]) -> dict[Path, str]:
    """Return what a model of each of ``homes`` is called: with the last directories that no other home ends with.

    A run's model is named by the run's directory, which is not named twice.
    """
    names = tell_apart(homes)
    return {home: name if home.name == model != name else f"{name}/{model}" for home, name in names.items()}


def _files(path: Path, report: Callable[[str], object]) -> list[Path]:
    if not path.is_dir():
        return [path]
    if files := _sort_by_name((path / "results").glob("*.json")):
        return files
    why = "is a run without results/: it has not ended, or could measure no scores"
    if (path / CONFIG).exists():
        raise ConfigError(f"{path} {why}")
    if files := _sort_by_name(path.glob("*.json")):
        return files
    files = _sort_by_name(path.glob("*/results/*.json"))
    if not files:
        raise ConfigError(f"{path} holds no files of results (MODEL_SET_N.json)")
    for run in sorted({file.parent for file in path.glob(f"*/{CONFIG}")} - {file.parents[1] for file in files}):
        report(f"not compared: {run} {why}")
    return files


def _sort_by_name(files: Iterable[Path]) -> list[Path]:
    """Return files by name, those of a model's plain answers before those of its strategies (MODEL.STRATEGY_SET_N)."""
    return sorted(files, key=lambda file: str(file).replace(".", "~"))


def group_by_score(results: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the results of sets that several models have, by what they are compared by.

    That is accuracy, or, of a set without reference answers, the first score that its models have in common.
    """
    sets: dict[str, list[Results]] = {}
    for result in results:
        sets.setdefault(result.set, []).append(result)
    groups: dict[str, list[Results]] = {}
    for set_results in sets.values():
        common = [name for name in set_results[0].scores if all(name in other.scores for other in set_results)]
        if common and len({result.name for result in set_results}) > 1:
            groups.setdefault("accuracy" if "accuracy" in common else common[0], []).extend(set_results)
    return groups


def compare_all(
    results: Sequence[Results],
    score: str = "accuracy",
    baseline: str | None = None,
    report: Callable[[str], object] = lambda text: None,
) -> list[Comparison]:
    """Compare every model with ``baseline``, by default the first, on each set that both have.

    ``report`` is called with why two models are not compared on a set, or one on none, where others are.
    Raises ConfigError where nothing can be compared: no second model, no set or question in common, or no such score.
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
    rows: list[Comparison] = []
    failed: list[ConfigError] = []
    for (model, name), result in by_place.items():
        if name != first and (model, first) in by_place:
            try:
                rows.append(_compare(by_place[model, first], result, score))
            except ConfigError as error:
                failed.append(error)
    if not rows and failed:
        raise failed[0]
    if not rows:
        raise ConfigError(f"no other model has results on a set of {first}: a comparison needs the same questions")
    for why in failed:
        report(f"not compared: {why}")
    on_sets_of_first = {name for one, name in by_place if (one, first) in by_place}
    for name in names:
        if name not in on_sets_of_first:
            report(f"not compared: {name} has no results on a set of {first}")
    sets = list(dict.fromkeys(result.set for result in results))
    rows.sort(key=lambda row: sets.index(row.set))
    corrected = holm([row.paired.p for row in rows])
    return [replace(row, holm_p=p) for row, p in zip(rows, corrected, strict=True)]


def _compare(first: Results, second: Results, score: str) -> Comparison:
    for result in (first, second):
        if score not in result.scores:
            raise ConfigError(
                f"--score {score}: {result.name} on {result.set} has {', '.join(result.scores) or 'no scores'}"
            )
    common = [
        key for key, scores in first.questions.items() if score in scores and score in second.questions.get(key, {})
    ]
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
