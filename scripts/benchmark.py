"""Measure speed and memory of TNNs and their peers, and write JSON and a table.

Times are measured with all variants interleaved in one process. Every ratio is the median of the per-round ratios.
What the pages on papers show beside these is measured by `docs/research/benchmark.py`.

Example:
    python scripts/benchmark.py models --model_name_or_path outputs/rpe outputs/rotary --contexts 512 14336
    python scripts/benchmark.py gpu --output_dir outputs/gpu
"""

import inspect
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import check_writable, write_json
from tnn_programs.cli.declared import NAMES
from tnn_programs.cli.parser import ProgramParser, option

PARTS = NAMES["tnn_programs.benchmarks.gpu.PARTS"]


@dataclass
class Benchmark:
    """The options of every suite."""

    repeats: int = option(3, "Number of rounds; results are medians.")
    device: str | None = None
    threads: int = option(1, "CPU threads; with 1, CPU time is measured.")
    output_file: Path | None = None


@dataclass
class Models(Benchmark):
    """The cost of trained models: a training step, a new token after a context, and the state that decoding keeps.

    A training step is the forward pass, the loss and the backward pass, without the optimizer. The loss of every model
    is computed by the same function, without the logits of the whole batch. A repeat of decoding is 128 tokens, a
    whole decoding block of a TNN whose kernels decay, in rounds of 32 tokens. Ratios are over the first model. The
    state is that of one sequence after the context, in MiB.
    """

    model_name_or_path: list[str] = field(kw_only=True)
    block_size: int = 512
    tokens: int = option(2048, "Tokens in a batch.")
    bf16: bool = option(False, "Train under autocast in bfloat16.")
    contexts: list[int] = option([512, 8192], "Tokens in the context.")
    batch_size: int = 1


@dataclass
class Gpu(Benchmark):
    """All that only a GPU can tell of speed: losses, training steps beside peers, decoding, Toeplitz products.

    Writes into --output_dir, after each row: gpu.json (all figures) and gpu.md (a page). What fails has its error in
    its row, and the others go on. Whether products are right on a GPU is a test (`make test-gpu`). With --device cpu
    --quick all runs with tiny sizes: a test of the program.
    """

    repeats: int = option(10, "Number of rounds; results are medians.")
    output_dir: Path = Path("outputs/gpu")
    quick: bool = option(False, "Tiny sizes, in less than a minute on a CPU.")
    parts: list[Literal[*PARTS]] = option([*PARTS], "Parts to run.")
    minutes: float = option(9.5, "Measure nothing more after this number of minutes.")


# Each is a module of `benchmarks/` with `run` and `table`.
SUITES = {
    "models": (Models, "trained models side by side: training step, new token, state"),
    "gpu": (Gpu, "what only a GPU can tell: how fast are losses, training steps, decoding and products?"),
}


def parse_arguments() -> Namespace:
    parser = ProgramParser(description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, (options, summary) in SUITES.items():
        suites.add_parser(name, help=summary, description=inspect.getdoc(options), classes=[options])
    return parser.parse_args()


@report_errors
def main():
    args = parse_arguments()
    if args.output_file is not None:
        check_writable(args.output_file)
    with importing("scripts"):
        suite = import_module(f"tnn_programs.benchmarks.{args.suite}")
        from tnn_programs.benchmarks.measure import measured

    result = measured(suite, args)
    sys.stdout.write(suite.table(result["rows"]) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, result)


if __name__ == "__main__":
    main()
