"""Measure speed and memory beside peers, in one process, interleaved; JSON and a table.

Example:
    python scripts/benchmark.py generation
    python scripts/benchmark.py generation --contexts 512 4096 --models rpe modal gpt2 --json outputs/generation.json
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from benchmark_generation import DEFAULT_MODELS, MODELS, run_generation, table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(dest="suite", required=True)
    generation = suites.add_parser("generation", help="time per new token and state, by length of the context")
    generation.add_argument("--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS, help="what to compare")
    generation.add_argument("--contexts", type=int, nargs="+", default=[512, 16384], help="tokens seen before")
    generation.add_argument("--hidden_size", type=int, default=512)
    generation.add_argument("--num_hidden_layers", type=int, default=6)
    generation.add_argument("--vocab_size", type=int, default=50265)
    generation.add_argument("--batch_size", type=int, default=1)
    generation.add_argument("--block", type=int, default=128, help="tokens in a repeat, in turns of 32")
    generation.add_argument("--repeats", type=int, default=3, help="the median counts")
    generation.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    generation.add_argument("--threads", type=int, default=1, help="on the CPU; with 1, CPU time is measured")
    generation.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    rows = run_generation(args)
    sys.stdout.write(table(rows) + "\n")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"settings": settings, "versions": versions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
