"""Settings that are possible and unlikely to work; usual learning rates of AdamW, by what is learned from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import ne
from typing import NamedTuple

from gkd.config.run import Config


class Rates(NamedTuple):
    """``usual``: the rate that is taken where none is set; ``most``: the one from which on none can work."""

    usual: float
    most: float


# A teacher gives a signal at every token, as data does in supervised training: 2e-5, and 2e-4 for adapters, as in the
# commands of TRL 1.16's distillation and SFT scripts. Measured, 60 steps of distillation: at 1e-6 the divergence goes
# from 2.32 to 2.30, at 5e-5 to 1.75, with adapters at 1e-4 to 1.82.
# A reward gives one number for a response, and its gradient is mostly noise: 1e-6, as in TRL's GRPOConfig, verl's
# examples and DAPO (arXiv 2503.14476, section 4.1).
# Adapters: ten times the rate of full fine-tuning, in supervised training and in reinforcement learning ("LoRA Without
# Regret", Schulman et al., Thinking Machines, 2025).
# What cannot work: a tenth of the usual rate learns next to nothing in hundreds of steps (above). AdamW moves every
# weight by about the rate at each step, and pretrained weights are of the order of 0.02: at 1e-3 little is left of them
# after tens of steps. Adapters, which begin at 0, stand ten times that.
_RATES = {
    (True, False): Rates(2e-5, 1e-3),
    (True, True): Rates(2e-4, 1e-2),
    (False, False): Rates(1e-6, 1e-3),
    (False, True): Rates(1e-5, 1e-2),
}
"""By whether a teacher's divergence or the data's answers are learned from, and whether adapters are trained."""


_LATEX = "abla|atural|e|earrow|eg|eq|exists|geq|i|leq|mid|ormalsize|ot|otin|u|warrow|onumber|ewline"
_TWO_CHARACTERS = re.compile(rf"\\n(?!(?:{_LATEX})(?![a-z]))")
"""A backslash and an n, which are no command of LaTeX."""


def rates(config: Config) -> Rates:
    """Return the rates that are usual for a run."""
    return _RATES[not config.algorithm.policy_weight or config.algorithm.distils, config.actor.lora.r is not None]


def doubts(config: Config) -> Iterator[str]:
    """Yield a warning, in one line, for each."""
    yield from find_doubtful_line_ends(config)
    yield from filter(
        None, (doubt(config) for doubt in (_learning_rate, _warmup, _mini_batch, _staleness, _truncation))
    )


def find_doubtful_line_ends(config: Config) -> Iterator[str]:
    """Yield a warning for each text in which ``\\n`` is two characters, as a shell and Hydra leave it."""
    texts = {
        "data.prompt_template": config.data.prompt_template or "",
        "data.system_prompt": config.data.system_prompt or "",
        "rollout.stop": " ".join(config.rollout.stop),
    }
    for setting, text in texts.items():
        if _TWO_CHARACTERS.search(text):
            yield (
                f"{setting} holds a backslash and an n, which are no line's end: in bash the setting typed between $' "
                "and ' has one"
            )


def _learning_rate(config: Config) -> str | None:
    """Return why ``actor.lr`` cannot work, in one line; None where it can.

    Models that a task makes on the spot may be far smaller than what the rates are usual for, and are left out.
    """
    lr, bounds = config.actor.lr, rates(config)
    if lr is None or config.uses_task or bounds.usual / 10 < lr < bounds.most:
        return None
    trained = "LoRA adapters" if config.actor.lora.r is not None else "all weights"
    algorithm = config.algorithm
    source = "a teacher" if algorithm.distils else "answers" if algorithm.is_supervised else "rewards"
    why = (
        "so little teaches next to nothing in hundreds of steps"
        if lr < bounds.usual
        else "AdamW moves every weight by about that much a step, which undoes a pretrained model"
    )
    return (
        f"actor.lr={lr:g} is unlikely to work: for {trained} learning from {source} {bounds.usual / 4:g} to "
        f"{bounds.usual * 5:g} is usual ({bounds.usual:g} unless set); {why}"
    )


def _warmup(config: Config) -> str | None:
    """Return a warning where the learning rate never gets to what it is set to; None where it does."""
    n_steps, total = config.actor.warmup_steps, config.trainer.total_steps
    if n_steps <= total:
        return None
    return f"actor.warmup_steps={n_steps}: the learning rate still rises after trainer.total_steps={total}"


def _mini_batch(config: Config) -> str | None:
    """Return a warning where a batch has fewer samples than an optimizer step is to take; None where it has as many."""
    size, samples = config.actor.mini_batch_size, config.trainer.batch_size * config.rollout.n
    if size is None or size <= samples:
        return None
    return (
        f"actor.mini_batch_size={size}: a batch has {samples} samples (trainer.batch_size={config.trainer.batch_size} "
        f"prompts, rollout.n={config.rollout.n}), which make one optimizer step"
    )


def _truncation(config: Config) -> str | None:
    """Return a warning where the student is sampled from fewer tokens than the reference knows of; None otherwise.

    The actor without its adapter, a reference as well, leaves out what the student does.
    """
    rollout = config.rollout
    setting = next((name for name in ("top_p", "top_k", "min_p") if ne(*rollout.read_setting(name))), None)
    if setting is None or not config.has_reference_group:
        return None
    return (
        f"rollout.{setting}={getattr(rollout, setting)}: the reference gives probabilities among all tokens, so "
        "actor/kl_reference and the divergence of rewards count what sampling leaves out, and are not 0 of equal models"
    )


def _staleness(config: Config) -> str | None:
    """Return a warning where a loss is known to suffer from samples as old as these may be; None without one."""
    staleness, loss = config.schedule.max_staleness, config.algorithm.loss
    most: int | None = loss.build().max_staleness
    if not config.algorithm.distils or most is None or staleness <= most:
        return None
    return (
        f"schedule.max_staleness={staleness} with algorithm.loss.name={loss.name}: on samples of weights so far behind "
        f"reverse KL is known to lose accuracy (AsyncOPD, arXiv 2606.24143); schedule.max_staleness={most} or less, or "
        "algorithm.loss.name=forward_kl, or jsd with beta below 1, would do"
    )
