"""What samples are made of: arrays that belong together, and seeds."""

from __future__ import annotations

import numpy as np
import pytest

from gkd.types import Prompt, Sample, SampleRequest, Sampling, VersionSpan, seed_of


def a_sample(sampled: list[int], *versions: tuple[int, int, int]) -> Sample:
    """One of as many tokens, of which some were sampled."""
    n = len(sampled)
    request = SampleRequest(Prompt(0, np.zeros(1, np.int32), ""), 0, 0, Sampling(8))
    spans = tuple(VersionSpan(*span) for span in versions)
    return Sample(request, np.zeros(n, np.int32), np.array(sampled, bool), np.zeros(n, np.float32), spans, "stop")


def test_stretches_of_several_turns() -> None:
    assert a_sample([0, 1, 1, 0, 1], (1, 3, 0), (4, 5, 2)).spans == ((1, 3), (4, 5))
    assert a_sample([0, 1, 0], (1, 2, 0)).spans == ((1, 2),)


@pytest.mark.parametrize(
    ("sampled", "versions", "message"),
    [
        ([1, 1], [(0, 2, 0)], "first token"),  # nothing before it predicts it
        ([0, 1, 1], [(1, 2, 0)], r"\[\(1, 2\)\].*\[\(1, 3\)\]"),
        ([0, 0, 1, 1], [(0, 2, 0)], r"\[\(0, 2\)\].*\[\(2, 4\)\]"),  # as many, counted from the response's first
        ([0, 1, 1], [(1, 2, 0), (1, 2, 1)], r"\[\(1, 2\), \(1, 2\)\].*\[\(1, 3\)\]"),
        ([0, 0], [], r"positions \[\], "),  # which has no version that it could be as old as
    ],
)
def test_what_does_not_belong_together_is_no_sample(
    sampled: list[int], versions: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        a_sample(sampled, *versions)


def test_every_reference_answer_counts() -> None:
    ids = np.zeros(1, np.int32)
    assert Prompt(0, ids, "", answer="4", other_answers=("four",)).answers == ("4", "four")
    assert Prompt(0, ids, "").answers == ()


def test_seeds_have_31_bits_and_are_the_same_everywhere() -> None:
    """Libraries differ in whether they take the 32nd."""
    seeds = [seed_of(0, step, place) for step in range(20) for place in range(20)]
    assert len(set(seeds)) == 400 and min(seeds) >= 0 and 2**30 < max(seeds) < 2**31
    assert seed_of(1, 2, 3) == 1049912948
