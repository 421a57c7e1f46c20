"""Measure speed and memory beside peers, in one process, interleaved; JSON and a table.

Example:
    python scripts/benchmark.py operators
    python scripts/benchmark.py training --lengths 512 2048
    python scripts/benchmark.py generation
    python scripts/benchmark.py generation --contexts 512 4096 --models rpe modal gpt2 --json outputs/generation.json
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import benchmark_generation
import benchmark_training
import torch
import transformers

SUITES = {
    "operators": (benchmark_training.run_operators, benchmark_training.table),
    "training": (benchmark_training.run_training, benchmark_training.table),
    "generation": (benchmark_generation.run_generation, benchmark_generation.table),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(dest="suite", required=True)
    operators = suites.add_parser("operators", help="forward and backward of one operator, beside the released form")
    training = suites.add_parser("training", help="a training step, beside the released form and GPT-2")
    generation = suites.add_parser("generation", help="time per new token and state, by length of the context")
    for suite in (operators, training):
        suite.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
        suite.add_argument("--tokens", type=int, default=8192, help="in a batch")
        suite.add_argument("--decay", type=float, default=0.99)
    operators.add_argument("--tno_type", default="rpe", choices=["rpe", "fd", "ski", "rtf"])
    operators.add_argument("--bidirectional", action="store_true")
    generation.add_argument("--models", nargs="+", choices=benchmark_generation.MODELS, help="what to compare")
    generation.set_defaults(models=benchmark_generation.DEFAULT_MODELS)
    generation.add_argument("--contexts", type=int, nargs="+", default=[512, 16384], help="tokens seen before")
    generation.add_argument("--batch_size", type=int, default=1)
    generation.add_argument("--block", type=int, default=128, help="tokens in a repeat, in turns of 32")
    for suite in (training, generation):
        suite.add_argument("--num_hidden_layers", type=int, default=6 if suite is generation else 2)
        suite.add_argument("--vocab_size", type=int, default=50265 if suite is generation else 1000)
    for suite in (operators, training, generation):
        suite.add_argument("--hidden_size", type=int, default=512)
        suite.add_argument("--repeats", type=int, default=3, help="the median counts")
        suite.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        suite.add_argument("--threads", type=int, default=1, help="on the CPU; with 1, CPU time is measured")
        suite.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    run, table = SUITES[args.suite]
    rows = run(args)
    sys.stdout.write(table(rows) + "\n")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"settings": settings, "versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
