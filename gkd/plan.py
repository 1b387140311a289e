"""``python -m gkd.plan``, which is ``gkd plan``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("plan")
