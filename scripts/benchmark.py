"""Measure speed and memory beside peers, in one process, interleaved; JSON, a table and a picture.

Example:
    python scripts/benchmark.py operators
    python scripts/benchmark.py operators --ways rpe fd ski --bidirectional --decay 1 --lengths 2048 8192
    python scripts/benchmark.py training --lengths 512 2048 --json outputs/training.json --plot outputs/training.png
    python scripts/benchmark.py training --ways "chunked" "chunked bf16"
    python scripts/benchmark.py memory
    python scripts/benchmark.py generation --contexts 512 4096 --models rpe modal gpt2
    python scripts/benchmark.py streaming --lengths 65536 262144
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import benchmark_generation
import benchmark_memory
import benchmark_operators
import benchmark_streaming
import benchmark_training
import torch
import transformers

SUITES = {
    "operators": (benchmark_operators.run_operators, benchmark_operators.table),
    "training": (benchmark_training.run_training, benchmark_training.table),
    "memory": (benchmark_memory.run_memory, benchmark_memory.table),
    "generation": (benchmark_generation.run_generation, benchmark_generation.table),
    "streaming": (benchmark_streaming.run_streaming, benchmark_streaming.table),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(dest="suite", required=True)
    operators = suites.add_parser("operators", help="forward and backward of one operator, beside the released form")
    training = suites.add_parser("training", help="a training step, beside the released form and transformers' models")
    memory = suites.add_parser("memory", help="what a training step keeps and takes, beside the same")
    generation = suites.add_parser("generation", help="time per new token and state, by length of the context")
    streaming = suites.add_parser("streaming", help="a long text in segments")
    for suite, module in (
        (operators, benchmark_operators),
        (training, benchmark_training),
        (memory, benchmark_memory),
    ):
        suite.add_argument(
            "--ways", nargs="+", choices=module.WAYS, default=module.DEFAULT_WAYS, help="what to compare"
        )
        suite.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
        suite.add_argument("--tokens", type=int, default=8192, help="in a batch")
        suite.add_argument("--decay", type=float, default=0.99)
    operators.add_argument("--bidirectional", action="store_true")
    operators.add_argument("--state_size", type=int, default=64, help="order of rtf")
    training.add_argument("--blocks_only", action="store_true", help="without embeddings, head and loss")
    add_generation_arguments(generation)
    streaming.add_argument(
        "--ways", nargs="+", choices=benchmark_streaming.WAYS, default=benchmark_streaming.DEFAULT_WAYS
    )
    streaming.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144])
    streaming.add_argument("--segment", type=int, default=8192, help="tokens fed at once")
    for suite, layers in ((training, 2), (memory, 2), (generation, 6), (streaming, 1)):
        suite.add_argument("--num_hidden_layers", type=int, default=layers)
    for suite, size in ((training, 1000), (memory, 1000), (generation, 50265)):
        suite.add_argument("--vocab_size", type=int, default=size)
    for suite in (operators, training, memory, generation, streaming):
        add_common_arguments(suite)
    return parser.parse_args()


def add_generation_arguments(suite: argparse.ArgumentParser):
    suite.add_argument("--models", nargs="+", choices=benchmark_generation.MODELS, help="what to compare")
    suite.set_defaults(models=benchmark_generation.DEFAULT_MODELS)
    suite.add_argument("--contexts", type=int, nargs="+", default=[512, 16384], help="tokens seen before")
    suite.add_argument("--batch_size", type=int, default=1)
    suite.add_argument("--block", type=int, default=128, help="tokens in a repeat, in turns of 32")


def add_common_arguments(suite: argparse.ArgumentParser):
    suite.add_argument("--hidden_size", type=int, default=512)
    suite.add_argument("--repeats", type=int, default=3, help="the median counts")
    suite.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    suite.add_argument("--threads", type=int, default=1, help="on the CPU; with 1, CPU time is measured")
    suite.add_argument("--json", type=Path, help="where to write the figures")
    suite.add_argument("--plot", type=Path, help="where to write a picture (PNG)")


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
    run, table = SUITES[args.suite]
    rows = run(args)
    sys.stdout.write(table(rows) + "\n")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"settings": settings, "versions": versions, "rows": rows}, indent=2) + "\n")
    if args.plot is not None:
        from benchmark_plot import plot  # matplotlib is needed for this alone

        plot(args.suite, rows, args.plot)


if __name__ == "__main__":
    main()
