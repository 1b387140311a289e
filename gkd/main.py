"""``python -m gkd.main +recipe=NAME [OVERRIDES]``, which is ``gkd train``."""

from __future__ import annotations

import sys

if not __package__:  # `python gkd/main.py` would look for gkd beside this file
    print("error: start it from the project's directory as a module: python -m gkd.main +recipe=NAME", file=sys.stderr)
    sys.exit(2)

from gkd.cli.command import run

if __name__ == "__main__":
    run("train")
