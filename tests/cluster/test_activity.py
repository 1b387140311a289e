"""What a worker says of its process."""

from __future__ import annotations

import subprocess
import sys


def test_a_report_imports_no_torch() -> None:
    """That takes more than a second, in which a worker that had no use for it stands still in the middle of a step."""
    program = """
import sys
from gkd.cluster.activity import report_here
assert report_here()["memory"]["process_gb"] > 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
