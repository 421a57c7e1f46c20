"""Make pairs of passages of any texts in the form of Retrieval of the Long Range Arena, for `tnn lra`.

A group is the rows of a data set with one value in a column, such as the parts of a book with its title: are two
passages of one group (label 1) or of two (label 0)? The passages of validation and test are from the last two tenths
of each text. No passage of a test was trained on, but every group was: the task is to recognise a group by others.

Example:
    python docs/research/passages.py texts/kinds --output_dir texts/kinds-pairs
    python docs/research/passages.py texts/novels --length 512 --output_dir texts/novels-pairs
    tnn lra --recipe lra/small-retrieval --dataset_path texts/kinds-pairs --output_dir outputs/kinds
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset

# Split -> its rows in the Long Range Arena, and the part of each text that its passages come from.
ROWS = {"train": 147_086, "validation": 18_090, "test": 17_437}
PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
# Smallest number of rows of a split.
FEWEST_ROWS = 100


def group_texts(data: DatasetDict, column: str) -> list[str]:
    """The text of each group, its rows in the order of the data set."""
    groups: dict[object, list[str]] = {}
    for rows in data.values():
        for group, text in zip(rows[column], rows["text"], strict=True):
            groups.setdefault(group, []).append(text)
    return ["".join(parts) for parts in groups.values()]


def parts_of(texts: list[str], split: str, length: int) -> list[str]:
    """The part of each text for a split, of those whose part has a passage of `length` characters: at least two."""
    first, last = PARTS[split]
    parts = [text[int(first * len(text)) : int(last * len(text))] for text in texts]
    long_enough = [part for part in parts if len(part) >= length]
    if len(long_enough) < 2:
        raise ValueError(f"At least 2 groups must have {length} characters for the {split} split: {len(long_enough)}")
    return long_enough


def pairs(count: int, seed: int, parts: list[str], length: int) -> Iterator[dict[str, object]]:
    """`count` pairs of passages of `length` characters, in turn of two groups (label 0) and of one (label 1).

    Every group is drawn equally often, and so is every place in it. The passages of a pair may overlap.
    """
    rng = np.random.default_rng(seed)
    for index in range(count):
        first, second = (parts[group] for group in rng.choice(len(parts), 2, replace=False))
        both = first, (first if index % 2 else second)
        starts = [int(rng.integers(len(part) - length + 1)) for part in both]
        texts = [part[start : start + length] for part, start in zip(both, starts, strict=True)]
        yield {"text1": texts[0], "text2": texts[1], "label": index % 2}


def splits(texts: list[str], rows: int, length: int) -> dict[str, Dataset]:
    """The pairs of each split, each by a seed: `rows` for training, the others in proportion."""
    found = {}
    for seed, (split, size) in enumerate(ROWS.items()):
        count = max(FEWEST_ROWS, round(rows / ROWS["train"] * size))
        found[split] = Dataset.from_list(list(pairs(count, seed, parts_of(texts, split, length), length)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", help="Folder or Hub id of a data set with the column `text`.")
    parser.add_argument("--pair_column", default="title", help="Column by which rows are of one group.")
    parser.add_argument("--length", type=int, default=256, help="Characters of a passage.")
    parser.add_argument("--rows", type=int, default=9600, help="Pairs for training.")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    texts = group_texts(load_dataset(args.texts), args.pair_column)
    for split, rows in splits(texts, args.rows, args.length).items():
        rows.to_parquet(args.output_dir / f"{split}.parquet")
        print(f"{args.output_dir / split}.parquet: {len(rows)} pairs")


if __name__ == "__main__":
    main()
