"""``python -m gkd.export``; the program is :mod:`gkd.cli.export`."""

from __future__ import annotations

import sys

from gkd.cli.export import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
