"""What a worker says of its process."""

from __future__ import annotations

import sys

import pytest

from gkd.cluster.workers.activity import memory_here


def test_a_report_of_memory_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes more than a second, in which a worker that had no use for it stands still in the middle of a step."""
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert set(memory_here()) == {"process_gb"}
