"""What a check of settings loads."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_checking_settings_loads_nothing_heavy() -> None:
    code = (
        "import sys, gkd.cluster.gpu; from gkd.config import Config, load, settings; load({}); settings(); "
        "c = Config(); "
        "sections = c.rollout, c.teacher, c.reference, c.reward_model, c.weights; "
        "[s.registry.load(name) for s in sections for name in s.registry.names()]; "
        "print([m for m in ('torch', 'vllm', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "gkd.losses.reverse_kl",
        "gkd.losses.clip",
        "gkd.algorithms.group_mean",
        "gkd.rewards.completion",
        "gkd.rewards.accuracy",
        "gkd.evaluation.strategies",
    ],
)
def test_an_entry_may_be_imported_before_the_settings_that_name_it(module: str) -> None:
    """As the user's files do, and without torch."""
    code = f"import sys, {module}, gkd.config; gkd.config.Config(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
