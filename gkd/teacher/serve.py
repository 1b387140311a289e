"""``python -m gkd.teacher.serve``, which is ``gkd serve-teacher``."""

from __future__ import annotations

from gkd.cli.command import run

if __name__ == "__main__":
    run("serve-teacher")
