"""What somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean ...?` with the known name that is most like `name`, or a full stop."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."
