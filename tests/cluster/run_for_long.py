"""A run that takes its workers, tells where it is, and stays until it is ended from outside.

With the argument `starting` it tells before Ray starts, to be ended while Ray does.
"""

import sys
import time

from gkd.cluster import session as session_module
from gkd.cluster.group import gather
from gkd.cluster.placement import place
from gkd.cluster.session import connect
from gkd.cluster.signals import exit_on_signals
from gkd.cluster.table import assignment_line
from tests.cluster.conftest import configuration


def tell(directory, *pids):
    print("at", directory, *pids, flush=True)


if __name__ == "__main__":
    exit_on_signals()
    if sys.argv[1:] == ["starting"]:
        start = session_module._start_private
        session_module._start_private = lambda directory, *rest: (tell(directory), start(directory, *rest))
    config = configuration({"gpus": [6]}, {"gpus": [4]}, None, simulate_gpus=3)
    with connect(config) as session:
        placement = place(config, session)
        actor = placement.groups["actor"]
        gather([actor.submit_build("tests.cluster.cluster_targets:Echo", [(0,)])], 60)
        tell(session.directory, *actor.call("spawn_child", timeout_s=60), *(r.pid for r in placement.reports))
        print(assignment_line(placement.reports), flush=True)
        actor.submit("wait_for_flag")
        time.sleep(300)
