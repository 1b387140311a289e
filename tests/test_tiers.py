"""Tiers and lanes, see tests/conftest.py."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HERE, LANES, lane, tier


def test_the_fast_tier_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"\['true'\]: .*tests/e2e"):
        subprocess.run(["true"], check=False)
    with pytest.raises(pytest.fail.Exception, match="tests/e2e"):
        multiprocessing.Process(target=print).start()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(pytest.fail.Exception, match="tests/vllm"):
        import vllm  # noqa: F401


@pytest.mark.parametrize(
    ("file", "expected"),
    [("losses/test_divergence.py", None), ("ray/actor/test_ranks.py", "ray"), ("test_errors.py", None)],
)
def test_the_tier_of_a_file_is_its_folders(file: str, expected: str | None) -> None:
    assert tier(HERE / Path(file)) == expected


def test_tests_that_share_a_ray_are_one_lane_and_other_files_are_lanes_of_their_own() -> None:
    files = ["ray/cluster/test_a.py", "vllm/weights/test_a.py", "e2e/on_a_cluster/test_a.py"]
    assert tuple(lane(f"tests/{file}::test_a[x/y]") for file in files) == LANES
    assert lane("tests/ray/actor/test_a.py::test") == lane("tests/vllm/weights/test_a.py::test")  # one process' Ray
    assert lane("tests/e2e/launch/test_a.py::test") == "e2e/launch/test_a.py"
    assert lane("tests/losses/test_a.py::test") == "losses/test_a.py"
