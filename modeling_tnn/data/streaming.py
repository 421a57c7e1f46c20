"""Examples from text that is read while a model trains on it: nothing is copied to the disk or kept in memory.

A stream has a fixed number of parts, `S`: example `n` is block `n // S` of part `n % S`, for any number of processes
and workers. Each process reads the parts of its examples, and each of its workers some of these. A part packs its rows
into blocks, and shuffles a window of blocks at a time. Its state is where the rows of its window begin: a resumed run
makes the window again. The shuffling of `datasets` would lose what its buffer holds.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from torch.utils.data import DataLoader, get_worker_info
from transformers import PreTrainedTokenizerBase

from tnn_cli.model_path import check_path, looks_like_file

from .text import (
    BlockStream,
    as_example,
    divide,
    enclosing_tokens,
    leave_signals_to_main,
    load_file,
    make_masking,
    random_generator,
    say_what_is_left_out,
    tokenize,
)

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
    check_path(name, "--dataset_name")
    splits = load_dataset(name, config_name, streaming=True)
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
        """The rows of a source in a part: files in an order by seed and epoch, or every so many rows of one file."""
        source, skipped = self.sources[number], self.skipped.get((number, part), 0)
        if source.num_shards < self.parts:
            source = source.reshard()  # row groups of parquet files
        whole = source.num_shards >= self.parts
        if whole:
            source = source.shard(self.parts, part, contiguous=False)
        if source.num_shards > 1:
            # What is left out is at the beginning of the first order. One row is no buffer, which would be lost.
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
        skipped = [f"{source}/{part}: {rows}" for (source, part), rows in sorted(self.skipped.items())]
        return {name: getattr(self, name) for name in ("names", "weights", "documents", "parts")} | {
            "held_out": skipped
        }

    def _check(self, name: str, source: IterableDataset):
        try:
            row = next(iter(source.take(1)))
        except (DatasetsError, ValueError, StopIteration) as error:
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


# Rows that are tokenized at once.
ROWS = 64
# Validation blocks, unless --max_eval_blocks or validation data are given.
HELD_OUT_BLOCKS = 100


def build_text_streams(
    args, accelerator: Accelerator, train: Mixture, validation: Mixture | None, tokenizer: PreTrainedTokenizerBase
) -> tuple["TextStream", BlockStream]:
    """The streams of training and, stored in memory, of validation examples by the options of `tnn pretrain`."""
    masked, count = args.objective == "mlm", args.max_eval_blocks
    if validation is None:
        blocks = hold_out(train, count or HELD_OUT_BLOCKS, tokenizer, args.block_size, masked)
    else:
        packer = Packer(validation, tokenizer, args.block_size, masked)
        blocks, _ = packer.first(validation.texts_of(validation.rows_of(0, 0)), count or math.inf)
        if count is None:
            say_what_is_left_out(len(packer.rest), "validation", args.block_size)
    if len(blocks) == 0:
        raise ValueError(f"The validation text is shorter than one block of {args.block_size} tokens.")
    held = Dataset.from_dict({"input_ids": blocks.astype(np.int64)})
    process = accelerator.process_index, accelerator.num_processes
    given = args.block_size, masked, args.mlm_probability, args.shuffle_buffer_size, process, accelerator.device
    stream = TextStream(train, tokenizer, *given)
    return stream, BlockStream(held, tokenizer, masked, args.mlm_probability, args.seed, shuffle=False)


def hold_out(
    mixture: Mixture, count: int, tokenizer: PreTrainedTokenizerBase, block_size: int, masked: bool
) -> np.ndarray:
    """The first blocks of the parts of each source, `count` in all. The mixture skips their rows from now on.

    They are divided by the weights of the sources, and evenly over the parts. The last of these rows may have more
    text than the blocks: the training begins with it.
    """
    held = [np.zeros((0, block_size), dtype=np.int32)]
    edges = np.round(np.cumsum([0, *mixture.shares]) * count).astype(int)
    for number, part in np.ndindex(len(mixture.shares), mixture.parts):
        wanted = int(np.sum(np.arange(edges[number], edges[number + 1]) % mixture.parts == part))
        if not wanted:
            continue
        packer = Packer(mixture, tokenizer, block_size, masked)
        blocks, read = packer.first(mixture.texts_of(mixture.rows_of(number, part)), wanted)
        if len(blocks) < wanted:
            raise ValueError(
                f"Shard {part + 1} of {mixture.parts} of {mixture.names[number]} must have {wanted} blocks of "
                f"{block_size} tokens for validation, got {len(blocks)}. Give --validation_file, a longer text, or a "
                "smaller --max_eval_blocks, --num_shards or --block_size."
            )
        mixture.skipped[number, part], mixture.unused[number, part] = read, packer.rest
        held.append(blocks)
    return np.concatenate(held)


class Packer:
    """Packs texts into blocks, one after the other. What does not fill a block waits for the next texts."""

    def __init__(self, mixture: Mixture, tokenizer: PreTrainedTokenizerBase, block_size: int, enclose: bool):
        self.tokenizer, self.block_size, self.rest = tokenizer, block_size, []
        self.enclosing = enclosing_tokens(tokenizer) if enclose else ([], [])
        self.ends = mixture.documents == "rows" and not enclose

    def blocks(self, texts: list[str]) -> np.ndarray:
        """The blocks that are full with these texts, `(N, L)`."""
        lines = tokenize(texts, self.tokenizer, [True] * len(texts) if self.ends else None)
        tokens = self.rest + [token for line in lines for token in line]
        blocks, self.rest = divide(tokens, self.block_size, self.enclosing)
        return np.array(blocks, dtype=np.int32).reshape(-1, self.block_size)

    def first(self, rows: Iterator[list[str]], count: float) -> tuple[np.ndarray, int]:
        """The first `count` blocks of the rows, or fewer if there are no more, and the number of rows read.

        `rest` has the further tokens of these rows.
        """
        found, number, read = [self.blocks([])], 0, 0
        while number < count and (texts := next(rows, None)) is not None:
            found.append(self.blocks(texts))
            number, read = number + len(found[-1]), read + 1
        blocks, end = np.concatenate(found), int(min(count, number))
        inner = slice(len(self.enclosing[0]), self.block_size - len(self.enclosing[1]))
        self.rest = blocks[end:, inner].flatten().tolist() + self.rest
        return blocks[:end], read


class PartReader:
    """Reads the blocks of one part, forward only.

    Its `state` belongs to the present window: the number of its first block, and the state of the rows and the tokens
    left over where the window begins.
    """

    def __init__(self, mixture: Mixture, packer: Packer, part: int, window: int, state: str | None = None):
        rest = [token for key in sorted(mixture.unused) if key[1] == part for token in mixture.unused[key]]
        given = json.loads(state) if state else {"first": 0, "rows": None, "rest": rest}
        self.rows, self.packer, self.first = MixedRows(mixture, part, given["rows"]), packer, given["first"]
        packer.rest = given["rest"]
        self.window_size, self.state, self.window = window, None, packer.blocks([])

    def block(self, number: int) -> np.ndarray:
        """Block `number` of the part, `(L,)`. The numbers must not fall."""
        while number - self.first >= len(self.window):
            self._next_window()
        return self.window[number - self.first]

    def _next_window(self):
        self.first += len(self.window)
        mixture, part = self.rows.mixture, self.rows.part
        state = {"first": self.first, "rows": self.rows.state_dict(), "rest": self.packer.rest}
        self.state, found, count = json.dumps(state), [], 0
        while count < self.window_size:
            found.append(self.packer.blocks(self.rows.next(ROWS)))
            count += len(found[-1])
            if self.first + count == 0 and min(self.rows.epochs) > 0:
                raise ValueError(
                    f"Shard {part + 1} of {mixture.parts} of the train text is shorter than one block of "
                    f"{self.packer.block_size} tokens. Give a longer text, or a smaller --num_shards or --block_size."
                )
        self.window = np.concatenate(found)
        if self.window_size > 1:
            order = random_generator(mixture.seed, 3, part, self.first)
            self.window = self.window[torch.randperm(count, generator=order).numpy()]


@dataclass(eq=False)
class TextStream:
    """A stream of examples `input_ids` and `labels`, as those of `BlockStream`, without a known number of blocks."""

    mixture: Mixture
    tokenizer: PreTrainedTokenizerBase
    block_size: int
    masked: bool
    mlm_probability: float = 0.15
    buffer_size: int = 1  # blocks that are shuffled at a time, in all parts together
    process: tuple[int, int] = (0, 1)  # the index and the number of the processes that read the stream
    device: torch.device | str = "cpu"

    def __post_init__(self):
        self.masking = make_masking(self.tokenizer, self.mlm_probability) if self.masked else None
        self.states: list[str | None] = [None] * self.mixture.parts

    def describe(self) -> dict:
        """The identity of the stream: its settings, and a checksum of the first block of each part."""
        first = [self.reader(part, 1).block(0) for part in range(self.mixture.parts)]
        checksum = zlib.crc32(np.stack(first).astype("<i8").tobytes())
        sizes = {"block_size": self.block_size, "shuffle_buffer_size": self.buffer_size}
        return self.mixture.describe() | sizes | {"checksum": checksum}

    def reader(self, part: int, window: int | None = None, state: str | None = None) -> PartReader:
        packer = Packer(self.mixture, self.tokenizer, self.block_size, self.masked)
        return PartReader(self.mixture, packer, part, window or -(-self.buffer_size // self.mixture.parts), state)

    def state_dict(self) -> dict:
        """The state of every part after the batches that the processes have taken. All of them have to call this."""
        known = [self.states, *gather_object([self.states])]
        return {"parts": [next(filter(None, states), None) for states in zip(*known, strict=True)]}

    def load_state_dict(self, state: dict):
        self.states = list(state["parts"])

    def loader(self, batch_size: int, start: int, stop: int, workers: int = 0, pin_memory: bool = False):
        """The batches of this process, of the examples from `start` to `stop`, as `BlockStream.loader`."""
        return StreamLoader(self, batch_size, start, stop, workers, pin_memory)

    def numbers(self, batch_size: int, start: int, stop: int) -> Iterator[range]:
        """The examples of each batch of this process: with P processes every P-th one."""
        index, processes = self.process
        for first in range(start, stop, batch_size * processes):
            yield range(first + index, min(first + batch_size * processes, stop), processes)

    def own_parts(self) -> list[int]:
        """The parts with examples of this process."""
        step = math.gcd(self.process[1], self.mixture.parts)
        return list(range(self.process[0] % step, self.mixture.parts, step))


class StreamLoader:
    """Batches on the device, each put together from the examples that the workers have made of it."""

    def __init__(self, stream: TextStream, batch_size: int, start: int, stop: int, workers: int, pin_memory: bool):
        self.stream, self.pin_memory, self.workers = stream, pin_memory, min(workers, len(stream.own_parts()))
        self.loader = DataLoader(
            _Pieces(stream, batch_size, start, stop),
            batch_size=None,
            generator=random_generator(stream.mixture.seed, 2, start),
            num_workers=self.workers,
            worker_init_fn=_set_up_worker,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        pieces = iter(self.loader)
        while batch := list(islice(pieces, max(self.workers, 1))):
            for piece in batch:
                for part, state in piece.pop("states").items():
                    self.stream.states[part] = state
            order = torch.cat([piece.pop("numbers") for piece in batch]).argsort()
            whole = {name: torch.cat([piece[name] for piece in batch])[order] for name in batch[0]}
            if self.pin_memory:  # what is put together of pinned pieces is not
                whole = {name: tensor.pin_memory() for name, tensor in whole.items()}
            yield send_to_device(whole, self.stream.device, non_blocking=True)


class _Pieces(torch.utils.data.IterableDataset):
    """What one worker makes of each batch: the examples of its parts, and the states of windows that begin."""

    def __init__(self, stream: TextStream, *batches: int):
        self.stream, self.batches = stream, batches

    def __iter__(self) -> Iterator[dict]:
        stream, parts, worker = self.stream, self.stream.mixture.parts, get_worker_info()
        own = stream.own_parts()[worker.id if worker else 0 :: worker.num_workers if worker else 1]
        readers = {part: stream.reader(part, state=stream.states[part]) for part in own}
        sent = {}
        for numbers in stream.numbers(*self.batches):
            numbers = [number for number in numbers if number % parts in readers]
            examples = [self._example(readers[number % parts], number) for number in numbers]
            present = {number % parts: readers[number % parts].state for number in numbers}
            begun = {part: state for part, state in present.items() if sent.get(part) != state}
            sent |= begun
            empty = [torch.empty(0, stream.block_size, dtype=torch.long)]  # there may be no examples
            tensors = {
                name: torch.cat(empty + [one[name][None] for one in examples]) for name in ("input_ids", "labels")
            }
            yield tensors | {"numbers": torch.tensor(numbers, dtype=torch.long), "states": begun}

    def _example(self, reader: PartReader, number: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(reader.block(number // self.stream.mixture.parts)).long()
        return as_example(ids, number, self.stream.masking, self.stream.mixture.seed)


def _set_up_worker(worker: int):
    # There are several workers, and the tokenizer warns of its threads in a forked process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    leave_signals_to_main(worker)
