"""``python -m gkd.monitor``; the program is :mod:`gkd.cli.monitor`."""

from __future__ import annotations

import sys

from gkd.cli.monitor import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
