"""What a check of settings loads."""

from __future__ import annotations

import subprocess
import sys


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
