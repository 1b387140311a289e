"""A run that takes its workers, tells where it is, and stays until it is ended from outside.

With the argument `starting` it tells before Ray starts, to be ended while Ray does; with `connecting` once Ray's
servers are started and it connects to them (`busy`: and takes four seconds to end), with `disconnected` where it never
does; with `hanging` Ray's start takes more than the second that it has.
`impatient` shortens the deadline of giving back. `waiting` waits for a call and has a second to finish without Ray's
control service; `joined` does so on the cluster that RAY_ADDRESS names. Otherwise it has done what it had to do when
that is gone.
"""

# ruff: noqa: E402
import multiprocessing
import os
import sys
import time

from gkd.cluster.session.shutdown import skip_teardown

skip_teardown()  # as the gkd command, before libraries are imported

from ray._private import worker

from gkd.cluster.layout.assignment import assignment_line
from gkd.cluster.session import connect as session_module
from gkd.cluster.session.connect import connect
from gkd.cluster.session.shutdown import exit_on_signals, leave
from gkd.cluster.workers.group import gather
from gkd.cluster.workers.placement import place
from gkd.errors import catch_errors
from tests.ray.cluster.conftest import configuration


def tell(directory, *pids):
    print("at", directory, *pids, flush=True)


def run():
    exit_on_signals()
    os.cpu_count = multiprocessing.cpu_count = lambda: 8  # Ray by itself would start a worker for each
    if sys.argv[1:] == ["starting"]:
        start = session_module._start_private
        session_module._start_private = lambda directory, *rest, **more: (
            tell(directory),
            start(directory, *rest, **more),
        )
    if sys.argv[1:] == ["hanging"]:
        session_module.START_TIMEOUT_S = 1.0
        session_module.ray.init = lambda *_, _temp_dir, **__: (tell(_temp_dir), time.sleep(600))
    if sys.argv[1:] == ["busy"]:
        close = session_module._close
        session_module._close = lambda *rest, **more: (time.sleep(4), close(*rest, **more))
    if sys.argv[1:] in (["connecting"], ["busy"]):
        joins = worker.connect
        worker.connect = lambda node, *rest, **more: (tell(node.get_temp_dir_path()), joins(node, *rest, **more))
    if sys.argv[1:] == ["disconnected"]:
        worker.connect = lambda node, *_, **__: (tell(node.get_temp_dir_path()), time.sleep(600))
    if sys.argv[1:] == ["impatient"]:
        session_module.RELEASE_TIMEOUT_S = 2.0
    waits = sys.argv[1:] in (["waiting"], ["joined"])
    if waits:
        session_module.finish_s, session_module.RESTART_GRACE_S = lambda *_: 1.0, 4.0
    config = configuration({"gpus": [6]}, {"gpus": [4]}, None, simulate_gpus=3)
    if sys.argv[1:] == ["joined"]:
        config = configuration(1, 1, None)
    with connect(config) as session:
        placement = place(config, session)
        actor = placement.groups["actor"]
        gather([actor.submit_build("tests.ray.cluster.cluster_targets:Echo", [(0,)])], 60)
        tell(session.directory, *actor.call("spawn_child", timeout_s=60), *(r.pid for r in placement.reports))
        print(assignment_line(placement.reports), flush=True)
        call = actor.submit("wait_for_flag")
        if waits:
            gather([call], 600)
        while not session.control.is_lost:
            time.sleep(0.1)
        return 0


if __name__ == "__main__":
    leave(catch_errors(run))
