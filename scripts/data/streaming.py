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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from torch.utils.data import DataLoader, get_worker_info
from transformers import PreTrainedTokenizerBase

from modeling_tnn.data.blocks import BlockStream, as_example, leave_signals_to_main, make_masking, random_generator
from modeling_tnn.data.text import divide, enclosing_tokens, say_what_is_left_out, tokenize
from tnn_programs.data.mixture import MixedRows, Mixture

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


def hold_out(mixture: Mixture, count: int, tokenizer, block_size: int, masked: bool) -> np.ndarray:
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
            needs = f"must have {wanted} blocks of {block_size} tokens for validation, got {len(blocks)}"
            advice = "Give --validation_file, or smaller --max_eval_blocks, --num_shards or --block_size."
            raise ValueError(f"Shard {part + 1} of {mixture.parts} of {mixture.names[number]} {needs}. {advice}")
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
        """The first `count` blocks of the rows, or fewer, and the number of rows read; `rest` has further tokens."""
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
                short = f"is shorter than one block of {self.packer.block_size} tokens"
                advice = "Give a longer text, or a smaller --num_shards or --block_size."
                raise ValueError(f"Shard {part + 1} of {mixture.parts} of the train text {short}. {advice}")
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
        parts = dict(enumerate(self.states))  # those of other processes may be old, from the checkpoint of a resume
        for own in gather_object([{part: self.states[part] for part in self.own_parts() if self.states[part]}]):
            parts |= own
        return {"parts": list(parts.values())}

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
    """The share of one worker in each batch: the examples of its shards, and the states of windows that begin."""

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
            names = ("input_ids", "labels")
            tensors = {name: torch.cat(empty + [one[name][None] for one in examples]) for name in names}
            yield tensors | {"numbers": torch.tensor(numbers, dtype=torch.long), "states": begun}

    def _example(self, reader: PartReader, number: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(reader.block(number // self.stream.mixture.parts)).long()
        return as_example(ids, number, self.stream.masking, self.stream.mixture.seed)


def _set_up_worker(worker: int):
    # There are several workers, and the tokenizer warns of its threads in a forked process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    leave_signals_to_main(worker)
