"""Memory that a process without a GPU frees and soon wants again: kept, instead of given back to the system.

Every operation of torch on a CPU allocates its result. glibc gives larger pieces back at once, and the system then
clears and maps each page anew when it is next written to, which takes a third of the time of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": 32 << 20,
    "MALLOC_TRIM_THRESHOLD_": 512 << 20,
    "MALLOC_TOP_PAD_": 16 << 20,
}
"""By glibc's names: from this size on a piece is mapped by itself, and given back when it is freed (glibc takes no
larger limit); so many free bytes are kept at the end of a heap; it grows by so many. A process reads them as it
starts."""
_NUMBERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}  # of <malloc.h>


def allocate_by(variables: Mapping[str, str]) -> None:
    """Have this process, which has started, allocate as those of ``variables`` say that are among VARIABLES.

    Other C libraries than glibc have no such limits, and nothing happens there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number in _NUMBERS.items():
        if mallopt is not None and name in variables:
            mallopt(number, int(variables[name]))
