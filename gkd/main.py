"""``python -m gkd.main +recipe=NAME [OVERRIDES]``; the program is :mod:`gkd.cli.train`."""

from __future__ import annotations

import sys

if not __package__:  # `python gkd/main.py` would look for gkd beside this file
    print("error: start it from the project's directory as a module: python -m gkd.main +recipe=NAME", file=sys.stderr)
    sys.exit(2)

from gkd.cli.train import main

__all__ = ["main"]

if __name__ == "__main__":
    from gkd.cluster.shutdown import leave

    leave(main())
