"""Lists what ``algorithm.name`` stands for: which losses there are, and defaults of what they are made of.

Everything else is a setting of its own, and may be combined as one likes: the divergence (``algorithm.loss.name``), the
advantages (``algorithm.advantage.name``), the surrogate and its ratio (``algorithm.policy``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Composition:
    """Describes an algorithm.

    ``distils``: whether the divergence from a teacher is its loss, beside which ``algorithm.reward_weight`` may put a
    policy gradient on rewards; otherwise that policy gradient is all there is, or, where it is ``supervised``, the
    cross-entropy on the data's own answers, for which nothing is sampled. ``ratio``: what ``algorithm.policy.ratio`` is
    by default.

    One of the user's own is an object of this class: ``algorithm.name=FILE.py:NAME``.
    """

    distils: bool
    ratio: Literal["token", "sequence"] = "token"
    supervised: bool = False


ON_POLICY_DISTILL = Composition(distils=True)
"""GKD (Agarwal et al., arXiv 2306.13649): the student is brought to the teacher on the student's own samples."""

GRPO = Composition(distils=False)
"""GRPO (Shao et al., arXiv 2402.03300): a clipped policy gradient with one importance ratio a token."""

GSPO = Composition(distils=False, ratio="sequence")
"""GSPO (Zheng et al., arXiv 2507.18071): the same with one importance ratio a response, and a narrow clip range."""

SFT = Composition(distils=False, supervised=True)
"""Supervised fine-tuning: cross-entropy on the tokens of the data's own answers, the prompts' left out."""
