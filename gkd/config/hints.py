"""What may have been meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


def nearest(key: str, known: Mapping[str, Any] | list[str]) -> str:
    """`` (did you mean X?)`` for a misspelt name, or an empty string when nothing is near."""
    longer = [name for name in known if name.startswith(key)][:1]
    close = longer or difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    if not close:  # the right leaf under the wrong section: compare last parts
        leaf = key.rsplit(".", 1)[-1]
        close = [k for k in known if k.rsplit(".", 1)[-1] == leaf][:1]
    return f" (did you mean {close[0]}?)" if close else ""
