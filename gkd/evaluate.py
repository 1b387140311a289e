"""``python -m gkd.evaluate``, which is ``gkd evaluate``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("evaluate")
