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
import importlib
import platform
import sys
from types import ModuleType

from tnn_scripts.common.errors import report_errors

import torch
import transformers

from tnn_scripts.benchmarks.arguments import add_common
from tnn_scripts.common.atomic import check_writable, write_json
from tnn_scripts.common.parser import ProgramParser

# Each is a module of `benchmarks/` with `add_arguments`, `run` and `table`.
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


def parse_arguments(modules: dict[str, ModuleType]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, module in modules.items():
        suite = suites.add_parser(name, help=SUITES[name], description=module.__doc__)
        add_common(suite)
        module.add_arguments(suite)
    return parser.parse_args()


@report_errors
def main():
    # Imported here, because processes that a suite starts need only that suite.
    modules = {name: importlib.import_module(f"tnn_scripts.benchmarks.{name}") for name in SUITES}
    args = parse_arguments(modules)
    for file in filter(None, (args.output_file, args.plot)):
        check_writable(file)
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("output_file", "plot")}
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
    rows = modules[args.suite].run(args)
    sys.stdout.write(modules[args.suite].table(rows) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, {"settings": settings, "versions": versions, "rows": rows})
    if args.plot is not None:
        from tnn_scripts.benchmarks.plot import plot  # only this needs matplotlib

        plot(args.suite, rows, args.plot)


if __name__ == "__main__":
    main()
