"""Scored samples as they are pickled: the arrays of all of them end to end.

Each array by itself takes as long as thousands of numbers, and a sample has up to ten. Larger ones stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from gkd.types import Array, Prompt, Sample, SampleRequest, ScoredSample, Target, VersionSpan

RowShapes: TypeAlias = list[tuple[int, ...] | None]
Column: TypeAlias = tuple[Array, RowShapes] | list[Array | None]
"""Arrays of one type end to end, and the shape of each, None where there is none; or those arrays themselves."""
LARGE_BYTES = 1 << 14
"""From this mean size on, copying an array takes longer than pickling it by itself."""

_PROMPT_ARRAYS = ("token_ids", "answer_ids", "teacher_ids")
_PROMPT = [field.name for field in fields(Prompt) if field.name not in _PROMPT_ARRAYS]
_REQUEST = [field.name for field in fields(SampleRequest) if field.name != "prompt"]
_values_of_prompt, _values_of_request = attrgetter(*_PROMPT), attrgetter(*_REQUEST)
_arrays_of_target = attrgetter("token_logprobs", "ids", "logprobs", "tail_logprobs")


class ScoredSamples(list[ScoredSample]):
    """Scored samples that are pickled together; unpickled they are a list, whose arrays cannot be written to."""

    def __reduce__(self) -> tuple[Any, ...]:
        columns = [_join(arrays) for arrays in zip(*map(_arrays, self), strict=True)]
        return _restore, ([_row(scored) for scored in self], columns)


def _arrays(scored: ScoredSample) -> tuple[Array | None, ...]:
    sample, prompt, teacher = scored.sample, scored.sample.request.prompt, scored.teacher
    of_teacher = (None,) * 4 if teacher is None else _arrays_of_target(teacher)
    return (
        prompt.answer_ids, prompt.teacher_ids, sample.token_ids, sample.sampled, sample.logprobs, scored.reference,
        *of_teacher,
    )  # fmt: skip


def _row(scored: ScoredSample) -> tuple[Any, ...]:
    """Return what is no array, as values that pickle handles by itself."""
    sample, request = scored.sample, scored.sample.request
    temperature = None if scored.teacher is None else scored.teacher.temperature
    return (
        len(request.prompt.token_ids), _values_of_prompt(request.prompt), _values_of_request(request),
        [tuple(span) for span in sample.versions], sample.finish_reason, temperature,
    )  # fmt: skip


def _restore(rows: Sequence[tuple[Any, ...]], columns: Sequence[Column]) -> list[ScoredSample]:
    scored = []
    for row, arrays in zip(rows, zip(*map(_split, columns), strict=True), strict=True):
        n_prompt, of_prompt, of_request, versions, finish_reason, temperature = row
        answer_ids, teacher_ids, token_ids, sampled, logprobs, reference, *of_teacher = arrays
        of_arrays = dict(zip(_PROMPT_ARRAYS, (token_ids[:n_prompt], answer_ids, teacher_ids), strict=True))
        prompt = Prompt(**of_arrays, **dict(zip(_PROMPT, of_prompt, strict=True)))
        request = SampleRequest(prompt, **dict(zip(_REQUEST, of_request, strict=True)))
        spans = tuple(VersionSpan(*span) for span in versions)
        sample = Sample(request, token_ids, sampled, logprobs, spans, finish_reason)
        teacher = None
        if temperature is not None:
            token_logprobs, ids, top, tails = of_teacher
            teacher = Target(token_logprobs, ids, top, temperature, tails)
        scored.append(ScoredSample(sample, teacher, reference))
    return scored


def _join(arrays: Sequence[Array | None]) -> Column:
    flat = [array.ravel() for array in arrays if array is not None]
    if sum(array.nbytes for array in flat) >= LARGE_BYTES * len(flat):  # also where there is none
        return list(arrays)
    return np.concatenate(flat), [None if array is None else array.shape for array in arrays]


def _split(column: Column) -> Iterator[Array | None]:
    if isinstance(column, list):
        yield from column
        return
    values, shapes = column
    start = 0
    for shape in shapes:
        if shape is None:
            yield None
            continue
        stop = start + math.prod(shape)
        yield values[start:stop].reshape(shape)
        start = stop
