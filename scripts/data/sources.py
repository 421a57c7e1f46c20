"""Sources of text that are read as streams, and mixed by weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
from datasets import IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetsError

from tnn_scripts.common.model_path import check_path
from tnn_scripts.data.files import builder_of, looks_like_file, reading_options

# Lines of a text file that stay together.
LINES = 100
# Draws between sources with one random generator.
DRAWS = 1000
# Characters that are tokenized at once, but for those of the last row.
CHARACTERS = 200_000
# Rows on which a tokenizer is trained.
TOKENIZER_ROWS = 10_000


def open_source(name: str, config_name: str | None = None) -> IterableDatasetDict:
    """The splits of a local file, a folder or a data set on the Hub, to be read as streams.

    Raises:
        ValueError: it cannot be read, or has no train split.
    """
    if looks_like_file(name):
        builder = builder_of(name)
        try:
            return load_dataset(builder, data_files=name, streaming=True, **reading_options(builder))
        except (DatasetsError, ValueError) as error:
            raise ValueError(f"{name} cannot be read: {error.__cause__ or error}") from error
    check_path(name, "--dataset_name")
    splits = load_dataset(name, config_name, streaming=True)
    if "train" not in splits:
        raise ValueError(f"{name} must have a train split, got {', '.join(splits)}")
    return splits


@dataclass
class Mixture:
    """Sources whose rows are mixed, in parts of which each has its own rows.

    Args:
        names: the names of the sources.
        sources: their rows.
        weights: the share of the rows of each; in turns unless given.
        text_column: the column of text.
        documents: `rows`, or `lines` where documents have no ends; as for `document_ends` unless given.
        parts: the number of parts.
        seed: seed of the order of files and of the draws between sources.
        skipped: rows at the beginning of each part of each source that are left out.
        unused: the tokens of these rows that nothing else uses, with which the part begins once.
    """

    names: Sequence[str]
    sources: Sequence[IterableDataset]
    weights: Sequence[float] | None = None
    text_column: str = "text"
    documents: str | None = None
    parts: int = 1
    seed: int = 0
    skipped: dict[tuple[int, int], int] = field(default_factory=dict)
    unused: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self):
        for name, source in zip(self.names, self.sources, strict=True):
            self._check(name, source)
        text = {source.builder_name == "text" for source in self.sources}
        if self.documents is None and len(text) > 1:
            raise ValueError("--documents must be rows or lines for text files together with other sources, got None")
        self.documents = self.documents or ("lines" if text == {True} else "rows")
        self.sources = [source.select_columns(self.text_column) for source in self.sources]
        self.shares = np.array(self.weights or [1] * len(self.sources)) / sum(self.weights or [len(self.sources)])

    def draws(self, part: int, start: int) -> Iterator[int]:
        """The sources of the rows of a part, from row `start`. The draws of a thousand rows have a generator."""
        count = len(self.sources)
        while True:
            if self.weights is None:
                drawn = np.arange(start // DRAWS * DRAWS, (start // DRAWS + 1) * DRAWS) % count
            else:
                random = np.random.default_rng((self.seed, part, start // DRAWS))
                drawn = random.choice(count, DRAWS, p=self.shares)
            yield from drawn[start % DRAWS :].tolist()
            start = (start // DRAWS + 1) * DRAWS

    def rows_of(self, number: int, part: int, epoch: int = 0) -> IterableDataset:
        """The rows of a source in a part: files in an order by seed and epoch, or every so many rows of one file."""
        source, skipped = self.sources[number], self.skipped.get((number, part), 0)
        if source.num_shards < self.parts:
            source = source.reshard()  # row groups of parquet files
        whole = source.num_shards >= self.parts
        if whole:
            source = source.shard(self.parts, part, contiguous=False)
        if source.num_shards > 1:
            # What is left out is at the beginning of the first order. One row is no buffer, which would be lost.
            seed = self._seed(part, 0 if skipped else epoch, number)
            source = source.shuffle(seed, buffer_size=1, max_buffer_input_shards=1)
        if self.documents == "lines":
            source = source.map(partial(_join, self.text_column), batched=True, batch_size=LINES)
        if not whole:
            chosen = partial(_every, self.parts, part)
            source = source.filter(chosen, True, self.text_column, batched=True, batch_size=1000)
        return source.skip(skipped) if skipped else source

    def texts_of(self, rows: IterableDataset) -> Iterator[list[str]]:
        """The texts of each row."""
        # Not `for row in rows`: in a worker of a loader, that would be a part of the rows.
        for batch in rows.iter(batch_size=1):
            texts = batch[self.text_column][0] if self.documents == "lines" else batch[self.text_column]
            if wrong := [text for text in texts if not isinstance(text, str | None)]:
                raise ValueError(f"--text_column must be a column of text, got {self.text_column} with {wrong[0]!r}")
            yield [text or "" for text in texts]

    def first_texts(self) -> IterableDataset:
        """The first texts of all sources, on which a tokenizer is trained."""
        return IterableDataset.from_generator(self._first_texts)

    def _first_texts(self) -> Iterator[dict[str, str]]:
        rows = MixedRows(replace(self, parts=1), 0)
        for _ in range(TOKENIZER_ROWS):
            texts = rows.next(1)
            if min(rows.epochs) > 0:
                return
            yield from ({"text": text} for text in texts)

    def describe(self) -> dict:
        """What the order of the rows depends on, besides the seed."""
        names = ("names", "weights", "documents", "parts")
        skipped = [f"{source}/{part}: {rows}" for (source, part), rows in sorted(self.skipped.items())]
        return {name: getattr(self, name) for name in names} | {"held_out": skipped}

    def _seed(self, *numbers: int) -> int:
        return int(np.random.SeedSequence((self.seed, *numbers)).generate_state(1)[0])

    def _check(self, name: str, source: IterableDataset):
        try:
            row = next(iter(source.take(1)), None)
        except (DatasetsError, ValueError) as error:
            raise ValueError(f"{name} has no rows that can be read: {error.__cause__ or error}") from error
        if row is None:
            raise ValueError(f"{name} has no rows.")
        if self.text_column not in row:
            raise ValueError(
                f"--text_column must be a column of {name}, one of {', '.join(row)}, got {self.text_column}"
            )


class MixedRows:
    """The rows of a part without an end. A source that has ended begins again, with its files in another order.

    `datasets.interleave_datasets` begins all sources again when an epoch ends, takes 0.7 ms for a row, and sleeps for
    seconds whenever it is left.
    """

    def __init__(self, mixture: Mixture, part: int, state: dict | None = None):
        self.mixture, self.part = mixture, part
        count = len(mixture.sources)
        given = state or {"read": 0, "epochs": [0] * count, "rows": [None] * count}
        self.read, self.epochs = given["read"], list(given["epochs"])
        self.draws = mixture.draws(part, self.read)
        self.rows, self.texts = [None] * count, [None] * count
        for number, rows in enumerate(given["rows"]):
            self._open(number, rows)

    def state_dict(self) -> dict:
        return {"read": self.read, "epochs": list(self.epochs), "rows": [rows.state_dict() for rows in self.rows]}

    def next(self, count: int) -> list[str]:
        """The texts of the next rows, fewer if they are long.

        Raises:
            ValueError: a source has no rows in this part.
        """
        found, characters = [], 0
        for number in islice(self.draws, count):
            self.read += 1
            texts = next(self.texts[number], None)
            if texts is None:
                self.epochs[number] += 1
                self._open(number)
                texts = next(self.texts[number], None)
            if texts is None:
                raise ValueError(
                    f"{self.mixture.names[number]} has no rows for shard {self.part + 1} of {self.mixture.parts}. "
                    "Give a longer text or a smaller --num_shards."
                )
            found += texts
            characters += sum(map(len, texts))
            if characters >= CHARACTERS:
                break
        return found

    def _open(self, number: int, state: dict | None = None):
        rows = self.mixture.rows_of(number, self.part, self.epochs[number])
        if state is not None:
            rows.load_state_dict(state)
        self.rows[number], self.texts[number] = rows, self.mixture.texts_of(rows)


def _join(column: str, batch: dict[str, list]) -> dict[str, list]:
    return {column: [batch[column]]}


def _every(parts: int, part: int, texts: list, numbers: list[int]) -> list[bool]:
    return [number % parts == part for number in numbers]
