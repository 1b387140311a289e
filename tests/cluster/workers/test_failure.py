"""What Ray raises about a worker, as the error that decides how the run goes on."""

from __future__ import annotations

import pickle

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
)

from gkd.cluster.workers.failure import NodeLost, WorkerDied, WorkerHung, explain
from gkd.errors import OutOfMemory, RemoteError, RunFailed, describe_error
from tests.error_text import contains_in_order


@pytest.mark.parametrize("kind", [ObjectLostError, OwnerDiedError, ObjectReconstructionFailedError])
def test_what_is_lost_with_a_node_counts_as_a_death_after_which_a_run_may_begin_again(kind: type[Exception]) -> None:
    """Also where a worker raises it on its way to another one: the actor, which fetches samples."""
    failure = explain(kind("00", None, ""), "fetching sampled responses")
    assert type(failure) is WorkerDied
    assert contains_in_order(str(failure), "sampled responses: ", "node", f"({kind.__name__})")
    assert type(explain(RayTaskError("update", "", failure), "actor rank 0")) is WorkerDied


def test_a_worker_whose_node_is_gone_is_named_without_what_ray_calls_it() -> None:
    """Before Ray knows that a node is gone its workers do not answer; when it knows, it says how."""
    address = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:9: Connection refused"
    silent = ActorUnavailableError(f"RpcError: RPC error: {address} rpc_code: 14", b"1" * 16)
    cause = "The actor died because its node has died. Node Id: 55aa the actor's node was terminated expectedly: TERM"
    left = RayActorError(error_msg=cause)
    for error, words in ((silent, "(Connection refused)"), (left, "(terminated expectedly: TERM)")):
        failure = explain(error, "rollout rank 1")
        assert type(failure) is WorkerDied
        assert contains_in_order(str(failure), "rollout rank 1 died: ", "node", words)
        assert "actor" not in str(failure).lower() and "rpc" not in str(failure).lower()


def test_the_kind_of_what_a_worker_raises_stays_what_it_is() -> None:
    for failure in (WorkerHung("a process of its engine is gone"), RunFailed("no")):
        error = explain(RayTaskError("serve", "", failure), "rollout rank 0")
        assert type(error) is type(failure) and str(error) == str(failure)
    assert not issubclass(NodeLost, WorkerDied)


def test_a_batch_that_does_not_fit_comes_with_what_to_try_instead() -> None:
    error = explain(RayTaskError("update", "", OutOfMemory("too much", 4096)), "actor rank 0")
    assert isinstance(error, OutOfMemory) and (str(error), error.budget) == ("too much", 4096)


def test_the_error_of_a_process_beyond_the_worker_has_one_class() -> None:
    """As of an engine's that did not start: the same line as of an engine in the worker's own process."""
    own, remote = ValueError("no\nmemory"), RemoteError("ValueError: no memory")
    assert describe_error(remote) == describe_error(own)
    lines = [str(explain(RayTaskError("build", "", error), "rollout rank 0")) for error in (own, remote)]
    assert lines[0] == lines[1] == "rollout rank 0 raised ValueError: no memory"


def test_what_ran_out_of_memory_comes_from_another_process_with_what_to_try() -> None:
    """Ray pickles what a worker raises."""
    for budget in (None, 30):
        error = pickle.loads(pickle.dumps(OutOfMemory("too long", budget)))
        assert (type(error), str(error), error.budget) == (OutOfMemory, "too long", budget)
