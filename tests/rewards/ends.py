"""A user's script that was not written to be imported."""

import sys

sys.exit(0)
