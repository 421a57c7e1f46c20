"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message: `; did you mean ...?` with the nearest known name, or a full stop."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."
