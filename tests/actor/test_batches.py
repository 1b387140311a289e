"""What the mini-batches of a step have in common."""

from __future__ import annotations

from gkd.actor.batches import combine_mini_batches


def test_metrics_of_mini_batches_are_means_and_maxima() -> None:
    rows = [{"actor/loss": 1.0, "mismatch/is_ratio_max": 4.0}, {"actor/loss": 2.0, "mismatch/is_ratio_max": 1.5}]
    assert combine_mini_batches(rows) == {"actor/loss": 1.5, "mismatch/is_ratio_max": 4.0}
    assert combine_mini_batches([]) == {}


def test_what_a_mini_batch_has_nothing_of_is_combined_without_it() -> None:
    stale, fresh = {"actor/loss": 1.0, "mismatch/stale_kl": 0.5}, {"actor/loss": 3.0, "mismatch/kl": 0.25}
    combined = {"actor/loss": 2.0, "mismatch/stale_kl": 0.5, "mismatch/kl": 0.25}
    assert combine_mini_batches([stale, fresh]) == combine_mini_batches([fresh, stale]) == combined
