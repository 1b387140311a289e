#!/usr/bin/env python
"""Check which GPU every worker gets, without loading a model: prints a table and ends.

    python launch/verify_gpus.py trainer.gpus=0 rollout.gpus=1-3 teacher.gpus=4-7
    python launch/verify_gpus.py --simulate-gpus 8 placement=8gpu       # on a machine without a GPU

The last line on stdout lists the GPU ids in the order actor, rollout, teacher and rank. Exit code 0: every worker has
the GPU it must have, and to itself. 1: two workers collide, or a range was not honoured. 2: the configuration is wrong
or does not fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if (ROOT / "gkd").is_dir():  # in a checkout, use its own gkd
    sys.path.insert(0, str(ROOT))

from gkd.cluster.shutdown import exit_on_signals, leave  # noqa: E402
from gkd.errors import ConfigError, Parser, guarded  # noqa: E402

if TYPE_CHECKING:
    from gkd.cluster.placement import Placement


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate-gpus", type=int, metavar="N", help="let Ray hand out N GPUs that are not there")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write one record a worker to this file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings, such as trainer.gpus=0-1")
    found = parser.parse_intermixed_args(argv)
    if found.json is not None:
        if not (parent := found.json.absolute().parent).is_dir():
            raise ConfigError(f"--json {found.json}: there is no directory {parent}")
        if found.json.is_dir() or not os.access(found.json if found.json.exists() else parent, os.W_OK):
            raise ConfigError(f"--json {found.json}: cannot be written")
    return found


def _show(placement: Placement, json_path: Path | None) -> None:
    from gkd.cluster.assignment import assignment_line, print_table

    print_table(placement.reports)
    print(assignment_line(placement.reports), flush=True)
    if json_path is not None:
        placement.write_json(json_path)


def _verify(argv: list[str]) -> int:
    arguments = _arguments(argv)
    from gkd.cluster.placement import PlacementFault, lay_out, place
    from gkd.cluster.session import connect
    from gkd.config.compose import compose

    simulate = [] if arguments.simulate_gpus is None else [f"cluster.simulate_gpus={arguments.simulate_gpus}"]
    config = compose([*arguments.overrides, *simulate])
    with connect(config) as session:
        try:
            _show(place(lay_out(config), session), arguments.json)
        except PlacementFault as fault:
            _show(fault.placement, arguments.json)
            raise
    return 0


def main(argv: list[str]) -> int:
    """Run the check; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("gkd").setLevel(logging.INFO)
    exit_on_signals()
    return guarded(lambda: _verify(argv))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
