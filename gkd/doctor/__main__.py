"""``python -m gkd.doctor``; the program is :mod:`gkd.cli.doctor`."""

from __future__ import annotations

import sys

from gkd.cli.doctor import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
