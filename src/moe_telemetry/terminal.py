"""Text that others have written, as a terminal may be given it."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """The same without what a terminal would obey or no encoding has, but for the characters to `keep`."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)
