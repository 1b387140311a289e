"""Serve a teacher outside the cluster: ``gkd serve-teacher teacher.model.path=DIR teacher.server_port=15555``.

Runs use it with ``teacher.server_ip=HOST``. It listens on 127.0.0.1 unless ``teacher.server_ip`` is another. Only
clients with its key are answered. On loopback that is in ``~/.cache/gkd/teacher.key``; any other address needs
``teacher.key_file``, of which clients need a copy. Either is made when it does not exist. One engine on the GPUs this
process sees. SIGTERM and SIGHUP end it with exit code 0, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gkd.cluster.session.shutdown import ServerStop
from gkd.errors import Parser, entry_point

if TYPE_CHECKING:
    from gkd.config import Config

# A run names its student and its data together with its teacher; a server has neither.
_DEFAULTS = ("model.path=none", "data.train_files=[none]", "data.val_files=[none]")


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns the exit code."""
    parser = Parser("gkd serve-teacher", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for gkd train; gkd settings teacher lists those of a teacher")
    overrides = parser.parse_args(arguments).overrides
    stop = ServerStop()
    with stop.keep_exit_code():
        config = compose_server(overrides)
        from gkd.scoring.standalone import serve

        return serve(config, stop)


def compose_server(overrides: Sequence[str]) -> Config:
    """Compose the configuration of a server, whose own defaults come below those of a file among the overrides."""
    from gkd.config.compose import compose, named_settings

    has_address = "teacher.server_ip" in named_settings(overrides)
    return compose([*_DEFAULTS, *([] if has_address else ["teacher.server_ip=127.0.0.1"]), *overrides])
