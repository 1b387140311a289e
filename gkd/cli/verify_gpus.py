"""Check which GPU every worker gets, without loading a model: prints a table and ends.

    gkd verify-gpus trainer.gpus=0 rollout.gpus=1-3 teacher.gpus=4-7
    gkd verify-gpus --simulate-gpus 8 placement=8gpu       # on a machine without a GPU

The last line on stdout lists the GPU ids in the order actor, rollout, teacher and rank. Exit code 0: every worker has
the GPU it must have, and to itself. 1: two workers collide, or a range was not honoured. 2: the configuration is wrong
or does not fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.cluster.session.shutdown import exit_on_signals
from gkd.errors import ConfigError, Parser, entry_point

if TYPE_CHECKING:
    from gkd.cluster.workers.placement import Placement


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("gkd verify-gpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate-gpus", type=int, metavar="N", help="let Ray hand out N GPUs that are not there")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write one record a worker to this file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings, such as trainer.gpus=0-1")
    options = parser.parse_intermixed_args(arguments)
    if options.json is not None:
        if not (parent := options.json.absolute().parent).is_dir():
            raise ConfigError(f"--json {options.json}: there is no directory {parent}")
        if options.json.is_dir() or not os.access(options.json if options.json.exists() else parent, os.W_OK):
            raise ConfigError(f"--json {options.json}: cannot be written")
    return options


def _show(placement: Placement, json_path: Path | None) -> None:
    from gkd.cluster.layout.assignment import assignment_line, placement_table
    from gkd.observability.progress import console, print_table

    print_table(console(), placement_table(placement.reports))
    print(assignment_line(placement.reports), flush=True)
    if json_path is not None:
        placement.write_json(json_path)


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Run the check; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("gkd").setLevel(logging.INFO)
    exit_on_signals()
    options = _parse(arguments)
    from gkd.cluster.session.connect import connect
    from gkd.cluster.workers.placement import lay_out, place
    from gkd.config.compose import compose

    simulate = [] if options.simulate_gpus is None else [f"cluster.simulate_gpus={options.simulate_gpus}"]
    config = compose([*options.overrides, *simulate])
    with connect(config) as session:
        place(lay_out(config), session, show=lambda placement, _: _show(placement, options.json))
    return 0
