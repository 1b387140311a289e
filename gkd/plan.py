"""``python -m gkd.plan``; the program is :mod:`gkd.cli.plan`."""

from __future__ import annotations

import sys

from gkd.cli.plan import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
