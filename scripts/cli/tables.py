"""Scores as text, and tables of them."""

from collections.abc import Iterable, Sequence

# Errors: lower is better, and they are not printed in percent.
ERRORS = {"mse"}


def format_metric(name: str, value: float) -> str:
    """The text of a score in percent, or of an error in its own unit."""
    return f"{value:.4g}" if name in ERRORS else f"{100 * value:.2f}"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table with `texts` columns of text, aligned left, before the columns of numbers, aligned right."""
    sides = ["left"] * texts + ["right"] * (len(headers) - texts)
    from tabulate import tabulate

    return tabulate(list(rows), list(headers), "pipe", disable_numparse=True, colalign=sides)
