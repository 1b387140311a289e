"""``python -m gkd.report``, which is ``gkd report``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("report")
