"""Every setting of a run: its name, type, default and meaning.

Hydra composes the tree (:mod:`gkd.config.compose`); this package turns the result into typed, frozen objects once, and
everything below takes those. Nothing here imports torch, vLLM, Ray or Hydra, so checking a configuration is instant.
"""

from __future__ import annotations

from gkd.config.actor import Actor, Lora
from gkd.config.base import GROUP_OF, SECTION_OF, Engine, Pool, Settings, escape, parse_gpus, quote, user_path
from gkd.config.cluster import MAX_AUTO_SIMULATED_GPUS, TRANSFERS, Cluster, Weights
from gkd.config.data import Data
from gkd.config.groups import Model, Reference, RewardModel, Rollout, Scorer, Teacher, TeacherModel, Trainer
from gkd.config.hints import hint, suggest
from gkd.config.learning import Algorithm, Loss, Policy
from gkd.config.loading import load, settings
from gkd.config.plan import Plan
from gkd.config.rewards import Reward
from gkd.config.run import Config, Watch

__all__ = [
    "GROUP_OF", "MAX_AUTO_SIMULATED_GPUS", "SECTION_OF", "TRANSFERS", "Actor", "Algorithm", "Cluster", "Config",
    "Data", "Engine", "Lora", "Loss", "Model", "Plan", "Policy", "Pool", "Reference", "Reward",
    "RewardModel", "Rollout", "Scorer", "Settings", "Teacher", "TeacherModel", "Trainer", "Watch", "Weights",
    "escape", "hint", "load", "parse_gpus", "quote", "settings", "suggest", "user_path",
]  # fmt: skip
