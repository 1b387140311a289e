"""``python -m gkd.doctor``, which is ``gkd doctor``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("doctor")
