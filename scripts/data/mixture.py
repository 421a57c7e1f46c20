"""Sources of text that are read as streams, and their rows in a mixture by weights.

A mixture has a fixed number of parts that share no rows. The rows of a part follow from the seed, whoever reads them:
the order of files by seed and epoch, the draws between sources by seed and row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
from datasets import IterableDataset
from datasets.exceptions import DatasetsError

from modeling_tnn.data.files import DAMAGED
from tnn_programs.cli.text_files import looks_like_file
from tnn_programs.data.corpus import load_file, load_folder

# Lines of a text file that stay together, and draws between sources with one random generator.
LINES, DRAWS = 100, 1000
# Characters that are tokenized at once, but for those of the last row.
CHARACTERS = 200_000
# Rows on which a tokenizer is trained.
TOKENIZER_ROWS = 10_000


def open_source(name: str, config_name: str | None = None) -> dict[str, IterableDataset]:
    """The splits of a local file, a folder or a data set on the Hub, to be read as streams."""
    if looks_like_file(name):
        return {"train": load_file(name, streaming=True)}
    splits = load_folder(name, config_name, streaming=True)
    if "train" not in splits:
        raise ValueError(f"{name} must have a train split, got {', '.join(splits)}")
    return splits


def open_corpus(args) -> tuple["Mixture", "Mixture | None"]:
    """The training text, and the validation text if there is one, by the options of `tnn pretrain`."""
    names = [args.train_file] if args.train_file is not None else args.dataset_name
    configs = args.dataset_config_name or [None] * len(names)
    splits = [open_source(name, config) for name, config in zip(names, configs, strict=True)]
    settings = {"text_column": args.text_column, "documents": args.documents, "seed": args.seed}
    called = [":".join(filter(None, pair)) for pair in zip(names, configs, strict=True)]
    weights, sources = args.interleave_probabilities or None, [split["train"] for split in splits]
    train = Mixture(called, sources, weights, parts=args.num_shards, **settings)
    name, validation = args.validation_file, None
    if name is not None:
        validation = open_source(name)["train"]
    elif len(splits) == 1 and "validation" in splits[0]:
        name, validation = f"the validation split of {names[0]}", splits[0]["validation"]
    return train, None if validation is None else Mixture([name], [validation], **settings)


@dataclass
class Mixture:
    """Sources whose rows are mixed, in parts that share no rows."""

    names: Sequence[str]
    sources: Sequence[IterableDataset]
    weights: Sequence[float] | None = None  # the share of the rows of each source; in turns unless given
    text_column: str = "text"
    documents: str | None = None  # `rows` or, where documents have no ends, `lines`, as for text files
    parts: int = 1
    seed: int = 0  # of the order of files, and of the draws between sources
    # Source and part -> rows at the beginning that are left out, and those of their tokens that the part begins with.
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
        weights = self.weights or [1] * len(self.sources)
        self.shares = np.array(weights) / sum(weights)

    def draws(self, part: int, start: int) -> Iterator[int]:
        """The sources of the rows of a part, from row `start`. The draws of a thousand rows have a generator."""
        count, block = len(self.sources), start // DRAWS
        while True:
            if self.weights is None:
                drawn = np.arange(block * DRAWS, (block + 1) * DRAWS) % count
            else:
                drawn = np.random.default_rng((self.seed, part, block)).choice(count, DRAWS, p=self.shares)
            yield from drawn[max(0, start - block * DRAWS) :].tolist()
            block += 1

    def rows_of(self, number: int, part: int, epoch: int = 0) -> IterableDataset:
        """The rows of a source in a part: files in an order by seed and epoch, or every n-th row of one file."""
        source, skipped = self.sources[number], self.skipped.get((number, part), 0)
        if source.num_shards < self.parts:
            source = source.reshard()  # row groups of parquet files
        whole = source.num_shards >= self.parts
        if whole:
            source = source.shard(self.parts, part, contiguous=False)
        if source.num_shards > 1:
            # Held-out rows are at the beginning of the first order. One row is no buffer, which would be lost.
            seed = np.random.SeedSequence((self.seed, part, 0 if skipped else epoch, number)).generate_state(1)[0]
            source = source.shuffle(int(seed), buffer_size=1, max_buffer_input_shards=1)
        if self.documents == "lines":
            source = source.map(partial(_join, self.text_column), batched=True, batch_size=LINES)
        if not whole:
            chosen = partial(_every, self.parts, part)
            source = source.filter(chosen, True, self.text_column, batched=True, batch_size=1000)
        return source.skip(skipped) if skipped else source

    def texts_of(self, rows: IterableDataset) -> Iterator[list[str]]:
        """The texts of each row."""
        # Not `for row in rows`: in a worker of a loader, that would be a part of the rows.
        kinds, batches = str if rows.builder_name == "json" else str | None, rows.iter(batch_size=1)
        while (batch := self._next(batches)) is not None:
            texts = batch[self.text_column][0] if self.documents == "lines" else batch[self.text_column]
            if wrong := [text for text in texts if not isinstance(text, kinds)]:
                raise ValueError(f"--text_column must be a column of text, got {self.text_column} with {wrong[0]!r}")
            yield [text or "" for text in texts]

    def _next(self, batches: Iterator[dict]) -> dict | None:
        try:
            return next(batches, None)
        except (*DAMAGED, ValueError, RecursionError) as error:
            raise ValueError(f"The text of {', '.join(self.names)} cannot be read: {error}") from error

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
        """Return the settings that the order of the rows depends on, besides the seed."""
        skipped = [f"{source}/{part}: {rows}" for (source, part), rows in sorted(self.skipped.items())]
        settings = {name: getattr(self, name) for name in ("names", "weights", "documents", "parts")}
        return settings | {"held_out": skipped}

    def _check(self, name: str, source: IterableDataset):
        try:
            row = next(iter(source.take(1)))
        except (DatasetsError, *DAMAGED, ValueError, StopIteration) as error:
            raise ValueError(f"{name} has no rows that can be read: {error.__cause__ or error}") from error
        if self.text_column not in row:
            found = ", ".join(row)
            raise ValueError(f"--text_column must be a column of {name}, one of {found}, got {self.text_column}")


class MixedRows:
    """The rows of a part without an end. A source that has ended begins again, with its files in another order.

    `datasets.interleave_datasets` begins all sources again when an epoch ends, takes 0.7 ms for a row, and sleeps for
    seconds whenever it is left.
    """

    def __init__(self, mixture: Mixture, part: int, state: dict | None = None):
        self.mixture, self.part = mixture, part
        count = len(mixture.sources)
        state = state or {"read": 0, "epochs": [0] * count, "rows": [None] * count}
        self.read, self.epochs = state["read"], list(state["epochs"])
        self.draws = mixture.draws(part, self.read)
        self.rows, self.texts = [None] * count, [None] * count
        for number, rows in enumerate(state["rows"]):
            self._open(number, rows)

    def state_dict(self) -> dict:
        return {"read": self.read, "epochs": list(self.epochs), "rows": [rows.state_dict() for rows in self.rows]}

    def next(self, count: int) -> list[str]:
        """The texts of the next rows, fewer if they are long."""
        found, characters = [], 0
        for number in islice(self.draws, count):
            self.read += 1
            texts = next(self.texts[number], None)
            if texts is None:
                self.epochs[number] += 1
                self._open(number)
                texts = next(self.texts[number], None)
            if texts is None:
                shard = f"{self.part + 1} of {self.mixture.parts}. Give a longer text or a smaller --num_shards."
                raise ValueError(f"{self.mixture.names[number]} has no rows for shard {shard}")
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
