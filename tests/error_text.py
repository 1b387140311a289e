"""What the text of an error has to contain: settings, files, names and numbers, in whatever words."""

from __future__ import annotations


def contains_in_order(text: str, *data: object) -> bool:
    """Return whether a text has all of ``data``, one after the other."""
    end = 0
    for datum in map(str, data):
        if (begin := text.find(datum, end)) < 0:
            return False
        end = begin + len(datum)
    return True
