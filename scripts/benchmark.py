"""Measure speed and memory of TNNs and their peers, and write JSON, a table and a picture.

Times are measured with all variants interleaved in one process. Every ratio is the median of the per-round ratios.

Example:
    python scripts/benchmark.py operators
    python scripts/benchmark.py operators --ways rpe fd ski --bidirectional --decay 1 --lengths 2048 8192
    python scripts/benchmark.py training --lengths 512 2048 --output_file training.json --plot training.png
    python scripts/benchmark.py training --ways "fused" "fused bf16"
    python scripts/benchmark.py memory
    python scripts/benchmark.py generation --contexts 512 4096 --models rpe modal gpt2
    python scripts/benchmark.py decoding --contexts 512 16384
    python scripts/benchmark.py serving --hidden_size 256
    python scripts/benchmark.py streaming --lengths 65536 262144
    python scripts/benchmark.py models --model_name_or_path outputs/rpe outputs/rotary --contexts 512 14336
    python scripts/benchmark.py state_size
    python scripts/benchmark.py long_range --models rpe transformer
    python scripts/benchmark.py alternatives --subjects split --lengths 512 8192
    python scripts/benchmark.py gpu --output_dir outputs/gpu
"""

import argparse
import platform
import sys
from importlib import import_module

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import check_writable, write_json
from tnn_scripts.common.declared import declared_text
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.options.benchmark import ADD, add_common

# Each is a module of `benchmarks/` with `run` and `table`.
SUITES = {
    "operators": "forward and backward of one operator, compared with the released form",
    "training": "a training step, compared with the released form and transformers' models",
    "memory": "memory of a training step, compared with the same",
    "generation": "time per new token and state, by length of the context",
    "decoding": "time per new token in one operator, compared with dot products",
    "serving": "many texts at once, compared with one after the other",
    "streaming": "time and memory of a long text in segments",
    "models": "trained models side by side: training step, new token, state",
    "state_size": "an RTF layer by its state size, compared with S4D and an associative scan",
    "long_range": "training steps per second of classifiers, by length",
    "alternatives": "products that the library leaves out, compared with its own",
    "gpu": "all that only a GPU can tell: are products right, and how fast are models?",
}


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, summary in SUITES.items():
        suite = suites.add_parser(name, help=summary, description=declared_text(f"tnn_scripts.benchmarks.{name}"))
        add_common(suite)
        ADD[name](suite)
    return parser.parse_args()


@report_errors
def main():
    args = parse_arguments()
    for file in filter(None, (args.output_file, args.plot)):
        check_writable(file)
    with importing("scripts"):
        import torch
        import transformers

        from tnn_scripts.common.devices import check_device

        suite = import_module(f"tnn_scripts.benchmarks.{args.suite}")
    args.device = check_device(args.device)
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("output_file", "plot")}
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
    rows = suite.run(args)
    sys.stdout.write(suite.table(rows) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, {"settings": settings, "versions": versions, "rows": rows})
    if args.plot is not None:
        from tnn_scripts.benchmarks.plot import plot  # only this needs matplotlib

        plot(args.suite, rows, args.plot)


if __name__ == "__main__":
    main()
