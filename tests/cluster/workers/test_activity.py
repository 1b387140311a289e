"""What a worker says of its process."""

from __future__ import annotations

import sys

import pytest

from gkd.cluster.workers.activity import memory_here, report_here


def test_a_report_of_memory_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes more than a second, in which a worker that had no use for it stands still in the middle of a step."""
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert set(memory_here()) == {"process_gb"}


def test_a_worker_reports_the_processes_of_its_engine_as_well() -> None:
    """On the host together, and of GPUs the one with most on it."""
    further = [{"process_gb": 2.0, "peak_gb": 3.0, "ooms": 0.0}, {"process_gb": 1.0, "peak_gb": 4.0, "ooms": 1.0}]
    memory = report_here(further)["memory"]
    assert memory["process_gb"] == pytest.approx(memory_here()["process_gb"] + 3, abs=0.1)
    assert (memory["peak_gb"], memory["ooms"]) == (4.0, 1.0)
