"""``python -m gkd.monitor``, which is ``gkd monitor``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("monitor")
