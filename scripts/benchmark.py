"""Measure speed and memory of trained models side by side, and write JSON and a table.

A training step, a new token after a context, and the state that decoding keeps. Times are measured with all models
interleaved in one process. Every ratio is the median of the per-round ratios. What the pages on papers show is
measured by `docs/research/benchmark.py`.

Example:
    python scripts/benchmark.py models --model_name_or_path outputs/rpe outputs/rotary --contexts 512 14336
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import check_writable, write_json
from tnn_programs.cli.parser import ProgramParser, option


@dataclass
class BenchmarkArguments:
    """The options of the measurement."""

    model_name_or_path: list[str]
    repeats: int = option(3, "Number of rounds; results are medians.")
    device: str | None = None
    threads: int = option(1, "CPU threads; with 1, CPU time is measured.")
    output_file: Path | None = None
    block_size: int = 512
    tokens: int = option(2048, "Tokens in a batch.")
    bf16: bool = option(False, "Train under autocast in bfloat16.")
    contexts: list[int] = option([512, 8192])
    batch_size: int = 1


@report_errors
def main():
    parser = ProgramParser([BenchmarkArguments], __doc__)
    parser.add_argument("suite", choices=("models",), help="What is measured: trained models.")
    args = parser.parse_args()
    if args.output_file is not None:
        check_writable(args.output_file)
    with importing("scripts"):
        from tnn_programs.benchmarks import models
        from tnn_programs.benchmarks.measure import measured

    result = measured(models, args)
    sys.stdout.write(models.table(result["rows"]) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, result)


if __name__ == "__main__":
    main()
