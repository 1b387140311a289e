"""``python -m gkd.teacher.serve``; the program is :mod:`gkd.cli.serve_teacher`."""

from __future__ import annotations

import sys

from gkd.cli.serve_teacher import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
