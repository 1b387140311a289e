"""``python -m gkd COMMAND``, which is ``gkd COMMAND``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run()
