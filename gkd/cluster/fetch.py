"""Getting what Ray object references stand for, with a deadline and an error that says what was awaited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gkd.cluster.failure import explain
from gkd.errors import RunFailed
from gkd.types import Record, Scored


def fetch(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """The objects behind ``refs``. Raises RunFailed, naming ``what``, when one is late or lost."""
    try:
        return list(ray.get(list(refs), timeout=timeout_s))
    except GetTimeoutError:
        raise RunFailed(f"{what} did not arrive within {timeout_s:g} s") from None
    except RayError as error:
        raise explain(error, f"fetching {what}") from error


def fetch_samples(places: Sequence[tuple[Any, int]], timeout_s: float) -> list[Scored]:
    """Samples by their places (see :func:`places_of`), each list of them fetched once."""
    refs = list(dict.fromkeys(ref for ref, _ in places))
    lists = dict(zip(refs, fetch(refs, timeout_s, "sampled responses"), strict=True))
    return [lists[ref][slot] for ref, slot in places]


def places_of(records: Sequence[Record]) -> list[tuple[Any, int]]:
    """Where the samples behind records are: a reference to a list, and the position in it."""
    return [(record.ref, record.slot) for record in records]
