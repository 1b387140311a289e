"""Getting what Ray object references stand for, with a deadline and an error that says what was awaited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gkd.cluster.failure import explain
from gkd.errors import RunFailed
from gkd.types import ScoredSample, TrainingSample


def fetch(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Fetch the objects behind ``refs``. Raises RunFailed, naming ``what``, when one is late or lost."""
    try:
        return list(ray.get(list(refs), timeout=timeout_s))
    except GetTimeoutError:
        raise RunFailed(f"{what} did not arrive within {timeout_s:g} s") from None
    except RayError as error:
        raise explain(error, f"fetching {what}") from error


def fetch_samples(samples: Sequence[TrainingSample], timeout_s: float) -> list[ScoredSample]:
    """Fetch the arrays of samples, in their order; each list that holds some is fetched once. Raises as fetch."""
    refs = list(dict.fromkeys(sample.ref for sample in samples))
    lists = dict(zip(refs, fetch(refs, timeout_s, "sampled responses"), strict=True))
    return [lists[sample.ref][sample.slot] for sample in samples]
