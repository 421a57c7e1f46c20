"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table with `texts` columns of text, aligned left, before the columns of numbers, aligned right."""
    sides = ["left"] * texts + ["right"] * (len(headers) - texts)
    return tabulate(list(rows), list(headers), "pipe", disable_numparse=True, colalign=sides)
