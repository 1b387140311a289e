"""``python -m gkd.report``; the program is :mod:`gkd.cli.report`."""

from __future__ import annotations

import sys

from gkd.cli.report import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
