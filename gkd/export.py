"""``python -m gkd.export``, which is ``gkd export``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("export")
