"""How long an update may take: any time, as long as its micro-batches begin; a rank that hangs ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray

from gkd.actor.group import ActorGroup
from gkd.config import load
from gkd.errors import RunFailed
from tests.actor import models
from tests.error_text import contains_in_order
from tests.ray.actor.ranks import put
from tests.ray.actor.test_memory import actor_of

LIMIT_S = 6.0  # far above what a busy machine lets a rank wait between two micro-batches
SLOW_S = 1.1


@pytest.fixture(scope="module")
def slow(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorGroup]:
    """Two ranks which take SLOW_S for each micro-batch, of one sample each."""
    directory = tmp_path_factory.mktemp("student")
    models.make("llama").save_pretrained(directory)
    settings = load(
        {
            "actor": {"max_tokens_per_micro_batch": 1},
            "trainer": {"total_steps": 10, "update_timeout_s": LIMIT_S, "save_timeout_s": LIMIT_S},
            "cluster": {"cpu_threads": 1},
        }
    )
    with actor_of(str(directory), 2, settings) as actor:
        ray.get([worker.__ray_call__.remote(delay, SLOW_S) for worker in actor.group.workers], timeout=60)
        yield actor


def attend(refs: Sequence[Any]) -> None:
    ray.wait(list(refs), timeout=0.1)


def delay(worker: Any, seconds: float) -> None:
    worker._object.trainer.student.lm.model.layers[0].register_forward_hook(lambda *_: time.sleep(seconds))


@pytest.mark.parametrize("streams", [False, True])
def test_an_update_that_goes_on_takes_longer_than_its_limit(slow: ActorGroup, streams: bool) -> None:
    batch, began = put(models.scored(12)), time.monotonic()
    if streams:
        slow.meanwhile = attend
        slow.accumulate([batch[:6], batch[6:]])
        slow.apply(2)
        slow.meanwhile = None
    else:
        slow.update(batch, 1)
    assert time.monotonic() - began > 6 * SLOW_S > LIMIT_S  # six of each rank, one after the other


def test_a_rank_that_hangs_in_a_micro_batch_is_found_when_the_time_is_over(slow: ActorGroup) -> None:
    ray.get(slow.group.workers[1].__ray_call__.remote(delay, 600.0), timeout=60)
    began = time.monotonic()
    with pytest.raises(RunFailed) as failure:
        slow.update(put(models.scored(4)), 3)
    assert contains_in_order(str(failure.value), f"{LIMIT_S:g} s", "trainer.update_timeout_s", "actor rank")
    assert time.monotonic() - began >= LIMIT_S
    with pytest.raises(RunFailed) as failure:
        slow.save("unused", attend)  # behind it
    assert contains_in_order(str(failure.value), "trainer.save_timeout_s", f"{LIMIT_S:g} s", "actor rank")
