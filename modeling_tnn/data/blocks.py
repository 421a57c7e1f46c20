"""Training examples by number, from blocks of tokens.

Example `i` of `N` blocks is block `p_e(i mod N)`, where `p_e` is the permutation of epoch `e = i // N`. Each example
draws its masked tokens with a separate generator. So a position in the data is one integer: a resumed run, or one with
another number of processes, sees the same examples.

N blocks, L tokens in each.
"""

import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from datasets import Dataset

VALIDATION_SHARE = 0.05


class BlockStream(torch.utils.data.Dataset):
    """A stream of examples `input_ids` and `labels`, `(L,)` each. Labels are -100 where nothing is predicted."""

    def __init__(
        self,
        blocks: "Dataset | Sequence",
        tokenizer: PreTrainedTokenizerBase,
        masked: bool,
        mlm_probability: float = 0.15,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.blocks = blocks.with_format("torch") if hasattr(blocks, "with_format") else blocks
        self.seed, self.shuffle = seed, shuffle
        self.masking = make_masking(tokenizer, mlm_probability) if masked else None

    def __len__(self) -> int:
        """The number of blocks. The stream continues beyond it."""
        return len(self.blocks)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return as_example(self.blocks[self.place(number)]["input_ids"], number, self.masking, self.seed)

    def place(self, number: int) -> int:
        """The block of an example."""
        epoch, place = divmod(number, len(self))
        return int(_permutation(self.seed, epoch, len(self))[place]) if self.shuffle else place

    @property
    def block_size(self) -> int:
        """The number of tokens in an example."""
        return len(self.blocks[0]["input_ids"])

    def describe(self) -> dict:
        """The identity of a set of blocks: their number, and a checksum of some."""
        places = sorted({0, len(self.blocks) // 2, len(self.blocks) - 1})
        ids = self.blocks[places]["input_ids"].numpy().astype("<i8")
        return {"blocks": len(self.blocks), "block_size": self.block_size, "checksum": zlib.crc32(ids.tobytes())}

    def state_dict(self) -> dict:
        """Nothing: a position in the data is one integer."""
        return {}

    def load_state_dict(self, state: dict):
        """There is nothing to load."""

    def loader(self, batch_size: int, start: int, stop: int, workers: int = 0, pin_memory: bool = False) -> DataLoader:
        """Batches of the examples from `start` to `stop`, in this order for any number of `workers`, processes.

        It draws nothing from the global generator. From pinned memory, an accelerator copies while it computes.
        """
        return DataLoader(
            self,
            batch_size,
            sampler=range(start, stop),
            generator=random_generator(self.seed, 2, start),
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=leave_signals_to_main,
            pin_memory=pin_memory,
        )


def make_masking(tokenizer: PreTrainedTokenizerBase, mlm_probability: float) -> DataCollatorForLanguageModeling:
    """The masking without a seed: with one it would replace the generators of `as_example`."""
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability)


def as_example(
    ids: torch.Tensor, number: int, masking: DataCollatorForLanguageModeling | None, seed: int
) -> dict[str, torch.Tensor]:
    """A block as example `number`, masked if `masking` is given."""
    if masking is None:
        return {"input_ids": ids, "labels": ids}
    masking.generator = random_generator(seed, 1, number)
    masked = masking([{"input_ids": ids}])
    return {"input_ids": masked["input_ids"][0], "labels": masked["labels"][0]}


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=random_generator(seed, 0, epoch))


def leave_signals_to_main(worker: int):
    """Ignore what terminals and schedulers send to all processes of a job. SIGTERM by the main one ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main():
    main = multiprocessing.parent_process().pid
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != main:
        pass
    os._exit(0)


def random_generator(*numbers: int) -> torch.Generator:
    """The random generator for these numbers, independent of the generators for other numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
