"""The ends of documents in a data set of texts, found in one of four ways.

`rows`: every row is a document. `lines`: rows are lines of one text, without marks for the ends of documents.
`headings`: rows are lines, and an article begins at a line " = Title = " between blank lines, as in WikiText. Names of
columns, such as `book,chapter`: neighbouring rows with the same values in them are one document.
"""

import re
from collections.abc import Sequence

import numpy as np
from datasets import Dataset

HEADING = re.compile(r" = [^=\n].* = \n?")
WAYS = ("rows", "lines", "headings")


def document_ends(rows: Dataset, text_column: str, documents: str | None = None) -> np.ndarray:
    """Whether a document ends with a row, `(N,)`.

    Args:
        documents: one of `WAYS`, or names of columns separated by commas. Unless given: `headings` if one of the first
            ten rows is a heading, `lines` for text files, else `rows`.

    Raises:
        ValueError: `documents` is neither one of `WAYS` nor names of columns.
    """
    if documents is None:
        documents = _usual_way(rows, text_column)
    if documents == "headings":
        return _ends_before_headings(rows[text_column])
    if documents in WAYS:
        return np.full(len(rows), documents == "rows")
    columns = documents.split(",")
    if not set(columns) <= set(rows.column_names):
        raise ValueError(
            f"--documents must be {', '.join(WAYS)} or columns among {', '.join(rows.column_names)}, got {documents}"
        )
    keys = list(zip(*(rows[column] for column in columns), strict=True))
    return np.array([key != after for key, after in zip(keys, [*keys[1:], None], strict=True)], dtype=bool)


def _usual_way(rows: Dataset, text_column: str) -> str:
    if _headings(rows[:10][text_column]).any():
        return "headings"
    return "lines" if rows.builder_name == "text" else "rows"


def _headings(texts: Sequence[str]) -> np.ndarray:
    """Where a title stands between blank rows: the same line inside a paragraph is a formula or a legend, `(N,)`."""
    kinds = np.array([(bool(HEADING.fullmatch(text)), not text.strip()) for text in texts]).reshape(-1, 2)  # (N, 2)
    title, blank = kinds.T
    blank_before, blank_after = np.r_[True, blank[:-1]], np.r_[blank[1:], True]
    return title & blank_before & blank_after


def _ends_before_headings(texts: Sequence[str]) -> np.ndarray:
    """The rows before a heading, but for the first, and the last row, `(N,)`."""
    starts = np.flatnonzero(_headings(texts))
    ends = np.zeros(len(texts), dtype=bool)
    ends[starts[1:] - 1] = True
    ends[-1:] = True
    return ends
