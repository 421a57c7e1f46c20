"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text, on the left, and whose others are numbers, on the right."""
    sides = ["left"] * texts + ["right"] * (len(headers) - texts)
    return tabulate(list(rows), list(headers), "pipe", disable_numparse=True, colalign=sides)
