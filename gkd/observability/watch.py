"""Warnings while a run goes on: what is wrong with a step, and which setting to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping

from gkd.config import Config
from gkd.config.device import Device
from gkd.config.registry import shorten_name
from gkd.config.rewards import REWARDS

log = logging.getLogger("gkd")

AGAIN_AFTER = 100
ESTIMATES_ERR = 0.01
"""Nats by which a mean over sampled tokens, or of rounded sums, is below a divergence that is 0: no reason to worry."""


class Watcher:
    """Gives each warning once, and again after :data:`AGAIN_AFTER` steps if it still or newly holds.

    ``device`` and ``n_unsampled`` as in :func:`warnings`.
    """

    def __init__(self, config: Config, device: Device, n_unsampled: int = 0) -> None:
        self.config, self.device, self.n_unsampled = config, device, n_unsampled
        self._warned_at: dict[str, int] = {}
        self._n_without = 0  # steps in a row in which every advantage was 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of what is wrong with a step, or with all of the last ones."""
        equal = metrics.get("advantage/mean") == metrics.get("advantage/std") == 0.0
        self._n_without = self._n_without + 1 if equal else 0
        step_warnings = warnings(self.config, self.device, metrics, self.n_unsampled)
        for name, text in (*step_warnings, *self._warn_of_no_advantage(metrics)):
            if step - self._warned_at.get(name, -AGAIN_AFTER) >= AGAIN_AFTER:
                self._warned_at[name] = step
                log.warning("step %d: %s", step, text, extra={"step": step, "metric": name})

    def _warn_of_no_advantage(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        most = self.config.watch.no_advantage_steps
        if self._n_without < most:
            return
        sampling = self.config.algorithm.dynamic_sampling
        more = "" if sampling.max_rounds > 1 else ", algorithm.dynamic_sampling.max_rounds"
        yield (
            "advantage/std",
            f"rewards have taught nothing for {self._n_without} steps (watch.no_advantage_steps={most}), as samples of "
            f"one prompt do not differ in them (reward/mean {metrics.get('reward/mean', math.nan):.3g}): samples.jsonl "
            "shows both; prompts that are neither too hard nor too easy, a larger "
            f"rollout.n={self.config.rollout.n}{more}",
        )


def warnings(
    config: Config, device: Device, metrics: Mapping[str, float], n_unsampled: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield name of the metric and text of every warning that a step's metrics call for.

    ``device`` is the actor's; ``n_unsampled``: rows of the student's logits that have no token.
    """
    watch = config.watch
    cut = metrics.get("response/clip_ratio", 0.0)
    limit = config.rollout.max_response_length
    if cut > watch.truncation_rate and metrics.get("response/limit", limit) >= limit:  # by rollout.horizon if lower
        yield (
            "response/clip_ratio",
            f"{cut:.0%} of the responses were cut off (watch.truncation_rate={watch.truncation_rate:g}): raise "
            f"rollout.max_response_length={config.rollout.max_response_length}{_advise_to_mask(config)}",
        )
    bands = {
        **{
            f"reward/{label}/kl": (
                f"reward_kl.{label}",
                band,
                f"lower the weight of {label} or raise algorithm.kl.coef",
            )
            for label, band in watch.reward_kl.items()
        },
        "distill/reverse_kl": ("distill_kl", watch.distill_kl, "lower actor.lr, or choose a nearer teacher"),
        "actor/kl_reference": ("reference_kl", watch.reference_kl, "raise algorithm.kl.coef or lower actor.lr"),
    }
    for name, (setting, (low, high), advice) in bands.items():
        if name in metrics and not low - ESTIMATES_ERR <= metrics[name] <= high:
            yield name, f"{name} {metrics[name]:.3g} is outside watch.{setting}=[{low:g}, {high:g}]: {advice}"
    apart = metrics.get("mismatch/kl", 0.0)
    if apart > watch.mismatch_kl:
        yield (
            "mismatch/kl",
            f"sampler and trainer disagree, mismatch/kl {apart:.3g} (watch.mismatch_kl={watch.mismatch_kl:g}): "
            f"{_advise_to_agree(config, device, n_unsampled)}",
        )
    for name, label in config.reward.labels().items():
        slow, metric = getattr(config.reward.settings_of(name), "slow_s", math.inf), f"reward/{label}/seconds"
        if metrics.get(metric, 0.0) > slow:
            advice = getattr(REWARDS.load(name), "advice_when_slow", "")
            setting = f"reward.{shorten_name(name)}.slow_s={slow:g}"
            yield metric, f"the reward {label} takes {metrics[metric]:.1f} s a sample ({setting}): {advice}"


def _advise_to_agree(config: Config, device: Device, n_unsampled: int) -> str:
    """Return which settings correct for a difference between sampler and trainer, and which make it smaller."""
    algorithm, lora, schedule = config.algorithm_on(device), config.actor.lora, config.schedule
    causes = {
        "schedule.recompute_cache=true": schedule.in_flight and not schedule.recompute_cache,
        "actor.lora.quantize=null": lora.quantize is not None,
        "actor.lora.dropout=0": lora.dropout > 0,
        "model.dtype=float32": config.model.dtype_on(device) != "float32",
    }
    advice = []
    if algorithm.weighs_samples and algorithm.importance_sampling.level is None:
        advice.append("algorithm.importance_sampling.level=token corrects for it")
    if lessens := [setting for setting, is_cause in causes.items() if is_cause]:
        advice.append(f"{' or '.join(lessens)} would lessen it")
    else:
        rows = ""
        if n_unsampled:
            rows = f", but the student's rows without a token ({n_unsampled}), never sampled but trained on, may"
        other = "another rollout.engine shows whether this one computes the model right"
        advice.append(f"no setting explains it{rows}: {other}")
    return "; ".join(advice)


def _advise_to_mask(config: Config) -> str:
    """Return the advice to leave cut responses out of the loss; empty where they are, or may not be."""
    if config.algorithm.overlong.action == "mask" or config.rollout.horizon.start is not None:
        return ""
    return ", or keep them out of the loss with algorithm.overlong.action=mask"
