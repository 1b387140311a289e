#!/usr/bin/env python
"""Check which GPU every worker gets, without loading a model: see gkd/cli/verify_gpus.py or --help."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if (ROOT / "gkd").is_dir():  # in a checkout, use its own gkd, in the workers too
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from gkd.cli.command import run  # noqa: E402

if __name__ == "__main__":
    run("verify-gpus")
