"""The sizes of the GPU benchmark: those of a GPU, and tiny ones with which the program runs on a CPU in a test.

Both rows of the table have every field, and each part gets all of them with the options: no part can ask for a size
that only one of them has.
"""

from argparse import Namespace
from typing import NamedTuple


class Sizes(NamedTuple):
    """The sizes of all parts."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tokens: int  # of a training step
    lengths: tuple[int, ...]  # of its sequences
    filters: tuple[tuple[int, int], ...]  # (length, taps) of products and tap gradients
    cases: tuple[tuple[int, int], ...]  # (length, taps on each side) of the oracles
    batch_sizes: tuple[int, ...]  # of decoding
    prompt: int
    counts: tuple[int, int]  # decoding is timed between so many new tokens, after graphs were recorded
    numbers: int  # that are copied to measure the speed of memory, and that are NaN before an oracle
    lines: int  # of the generated text
    words: int
    recipe_options: tuple  # further options of `pretrain.py`
    recipe_seconds: int  # after which it is ended by the signal that saves it


REAL = Sizes(
    hidden_size=512,
    num_hidden_layers=6,
    vocab_size=50265,
    tokens=16384,
    lengths=(2048, 512, 8192),
    filters=((2048, 828), (512, 512), (8192, 828), (2048, 1587), (8192, 1587), (8192, 4096)),
    cases=((1, 1), (17, 40), (4099, 200), (2048, 1587)),
    batch_sizes=(1, 64),
    prompt=512,
    counts=(160, 416),
    numbers=2**28,
    lines=10000,
    words=30000,
    recipe_options=("--logging_steps", 8),  # the host waits for a step that it logs
    recipe_seconds=120,
)
TINY = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8,gtu_expansion=2,vocab_size=600"
QUICK = Sizes(
    hidden_size=32,
    num_hidden_layers=1,
    vocab_size=600,
    tokens=128,
    lengths=(64,),
    filters=((64, 16), (128, 16)),
    cases=((1, 1), (17, 5), (300, 33)),
    batch_sizes=(1, 8),
    prompt=16,
    counts=(4, 8),
    numbers=2**20,
    lines=400,
    words=500,
    recipe_options=(
        "--max_steps",
        2,
        "--gradient_accumulation_steps",
        1,
        "--config_overrides",
        TINY,
        "--block_size",
        64,
    ),
    recipe_seconds=300,
)


def sized(args: Namespace) -> Namespace:
    """The options with all sizes, and what models of other suites ask for."""
    sizes = QUICK if args.quick else REAL
    return Namespace(**(vars(args) | sizes._asdict() | {"decay": 0.99, "blocks_only": False}))
