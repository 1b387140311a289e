"""The process of one check: python -m tests.gpu.checks package.module:function RESULT SCRATCH N_GPUS"""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
import traceback
from pathlib import Path

from tests.gpu.checks.context import Context, Skipped


def main(target: str, result: str, scratch: str, n_gpus: str) -> int:
    """Run the check and write how it ended. Returns the exit code."""
    context = Context(int(n_gpus), Path(scratch), Path(result))
    context.write(None)
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # where it was when its time was over
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(context)
    except Skipped as reason:
        context.write("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        context.write("failed", " ".join(f"{kind}{error}".split())[:600])
        return 1
    else:
        context.write("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
