"""The LLM judge in the processes of rewards."""

from __future__ import annotations

import pytest

from gkd.config import Reward
from gkd.rewards.pool import RewardPool
from tests.rewards.test_judge import COMPLETION, serve


def test_a_process_waits_for_many_marks_at_a_time() -> None:
    """Else a step's samples would be judged one after the other."""
    with serve() as endpoint:
        endpoint.says, endpoint.delay_s = ["3"] * 32, 0.5
        judge = {"url": endpoint.url, "model": "m", "timeout_s": 30.0}
        settings = {"functions": ["judge"], "judge": judge, "workers": 1, "timeout_s": 60.0}
        pool = RewardPool(Reward.model_validate(settings))
        try:
            futures = [pool.submit(COMPLETION)["judge"] for _ in range(32)]
            assert [future.result(120)[0] for future in futures] == [pytest.approx(0.3)] * 32
        finally:
            pool.close()
        assert endpoint.most_at_once > 8
