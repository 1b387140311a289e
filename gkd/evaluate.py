"""``python -m gkd.evaluate``; the program is :mod:`gkd.cli.evaluate`."""

from __future__ import annotations

import sys

from gkd.cli.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
