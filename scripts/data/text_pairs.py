"""Pairs of passages, both of one group of texts or of two: the Retrieval task without the data of its authors.

A group is the rows of a data set with one value in a column, such as the parts of a book with its title. Its text is
cut once: passages of the training come from its first 80%, those of the validation and the test from the next and the
last 10%. So no passage of a test was trained on, but every group was: the task is to recognise a group by other
passages.
"""

from collections.abc import Iterator

import numpy as np
from datasets import DatasetDict

# The part of each text that the passages of a split come from.
PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}


def group_texts(data: DatasetDict, column: str) -> list[str]:
    """The text of each group, its rows in the order of the data set; a ValueError if a column does not exist."""
    groups: dict[object, list[str]] = {}
    for split, rows in data.items():
        for name, option in ((column, "--pair_column"), ("text", "--dataset_path")):
            if name not in rows.column_names:
                found = ", ".join(rows.column_names)
                raise ValueError(f"{option} must have the column {name} in the {split} split, got {found}")
        for group, text in zip(rows[column], rows["text"], strict=True):
            groups.setdefault(group, []).append(text)
    return ["".join(parts) for parts in groups.values()]


def parts_of(texts: list[str], split: str, length: int) -> list[str]:
    """The part of each text for a split, of those whose part has a passage of `length` characters: at least two."""
    first, last = PARTS[split]
    parts = [text[int(first * len(text)) : int(last * len(text))] for text in texts]
    long_enough = [part for part in parts if len(part) >= length]
    if len(long_enough) < 2:
        raise ValueError(
            f"--pair_column must give at least 2 groups with {length} characters for the {split} split, "
            f"got {len(long_enough)}. Give a smaller --max_length."
        )
    return long_enough


def samples(count: int, seed: int, parts: tuple[str, ...], length: int) -> Iterator[dict[str, object]]:
    """`count` pairs of passages of `length` characters, in turn of two groups (label 0) and of one (label 1).

    Every group is drawn equally often, and so is every place in it. The passages of a pair may overlap.
    """
    random = np.random.default_rng(seed)
    for index in range(count):
        first, second = (parts[group] for group in random.choice(len(parts), 2, replace=False))
        both = first, (first if index % 2 else second)
        starts = [int(random.integers(len(part) - length + 1)) for part in both]
        texts = [part[start : start + length] for part, start in zip(both, starts, strict=True)]
        yield {"text1": texts[0], "text2": texts[1], "label": index % 2}
