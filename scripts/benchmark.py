"""Measure speed and memory of TNNs and their peers, and write JSON and a table.

Times are measured with all variants interleaved in one process. Every ratio is the median of the per-round ratios.
What the pages on papers show beside these is measured by `docs/research/benchmark.py`.

Example:
    python scripts/benchmark.py products
    python scripts/benchmark.py products --ways rpe fd ski --bidirectional --decay 1 --lengths 2048 8192
    python scripts/benchmark.py models --model_name_or_path outputs/rpe outputs/rotary --contexts 512 14336
    python scripts/benchmark.py decoding --contexts 512 16384
    python scripts/benchmark.py serving --hidden_size 256
    python scripts/benchmark.py gpu --output_dir outputs/gpu
"""

import sys
from argparse import Namespace
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from tnn_cli.errors import importing, report_errors

from tnn_cli.atomic import check_writable, write_json
from tnn_cli.declared import declared_keys, declared_text
from tnn_cli.parser import ProgramParser, option

OPERATORS = declared_keys("modeling_tnn.configuration_tnn", "DIRECTIONS")
PRODUCTS = ("released", *(way for name in OPERATORS for way in (name, f"{name} eager")))
TNNS = declared_keys("modeling_tnn.benchmarks.peers", "FIELDS")
DECODERS = (*TNNS, *declared_keys("modeling_tnn.benchmarks.decoding", "DOTS"))
PARTS = declared_keys("modeling_tnn.benchmarks.gpu", "PARTS")
WIDTH, CONTEXTS = "Width of the models.", "Tokens in the context."


@dataclass
class Benchmark:
    """The options of every suite."""

    repeats: int = option(3, "Number of rounds; results are medians.")
    device: str | None = None
    threads: int = option(1, "CPU threads; with 1, CPU time is measured.")
    output_file: Path | None = None


@dataclass
class Products(Benchmark):
    ways: list[Literal[*PRODUCTS]] = option(["released", "rpe", "rpe eager"], "Variants to compare.")
    lengths: list[int] = option([512, 2048, 8192])
    tokens: int = option(8192, "Tokens in a batch.")
    decay: float = option(0.99, "Decay of the kernels; 1 for none.")
    hidden_size: int = option(512, WIDTH)
    bidirectional: bool = option(False, "Measure bidirectional operators.")
    state_size: int = option(64, "Order of the rtf operator.")


@dataclass
class Models(Benchmark):
    model_name_or_path: list[str] = field(kw_only=True)
    block_size: int = 512
    tokens: int = option(2048, "Tokens in a batch.")
    bf16: bool = option(False, "Train under autocast in bfloat16.")
    contexts: list[int] = option([512, 8192], CONTEXTS)
    batch_size: int = 1


@dataclass
class Decoding(Benchmark):
    ways: list[Literal[*DECODERS]] = option(["rpe-no-decay", "matmul", "vecdot"], "Variants to compare.")
    contexts: list[int] = option([512, 16384], CONTEXTS)
    batch_size: int = 1
    hidden_size: int = option(512, WIDTH)


@dataclass
class Serving(Benchmark):
    hidden_size: int = option(512, WIDTH)
    num_hidden_layers: int = option(6, "Number of layers.")
    vocab_size: int = option(10000, "Size of the vocabulary.")
    models: list[Literal[*TNNS]] = option(["rpe", "fd", "rtf", "modal"], "Models to compare.")
    requests: int = option(32, "Number of texts.")
    alone: int = option(4, "How many of them `generate` writes in a repeat.")
    prompts: list[int] = option([16, 64], "Least and most tokens of a prompt.", nargs=2)
    new_tokens: int = option(128, "Tokens that are written after a prompt.")


@dataclass
class Gpu(Benchmark):
    repeats: int = option(10, "Number of rounds; results are medians.")
    output_dir: Path = Path("outputs/gpu")
    quick: bool = option(False, "Tiny sizes, in less than a minute on a CPU.")
    parts: list[Literal[*PARTS]] = option([*PARTS], "Parts to run.")
    minutes: float = option(9.5, "Nothing more is measured after so many minutes.")


# Each is a module of `benchmarks/` with `run` and `table`.
SUITES = {
    "products": (Products, "forward and backward of one operator, compared with the released form"),
    "models": (Models, "trained models side by side: training step, new token, state"),
    "decoding": (Decoding, "time per new token in one operator, compared with dot products"),
    "serving": (Serving, "many texts at once, compared with one after the other"),
    "gpu": (Gpu, "what only a GPU can tell: how fast are losses, training steps, decoding and products?"),
}


def parse_arguments() -> Namespace:
    parser = ProgramParser(description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, (options, summary) in SUITES.items():
        text = declared_text(f"modeling_tnn.benchmarks.{name}")
        suites.add_parser(name, help=summary, description=text, classes=[options])
    return parser.parse_args()


@report_errors
def main():
    args = parse_arguments()
    if args.output_file is not None:
        check_writable(args.output_file)
    with importing("scripts"):
        suite = import_module(f"modeling_tnn.benchmarks.{args.suite}")
        from modeling_tnn.benchmarks.measure import measured

    result = measured(suite, args)
    sys.stdout.write(suite.table(result["rows"]) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, result)


if __name__ == "__main__":
    main()
