"""Measure what only the pages on papers and results show, and write JSON, a table and a picture.

Times are measured with all variants interleaved in one process.

Example:
    python docs/research/benchmark.py models --model_name_or_path outputs/rpe outputs/rotary --contexts 512 14336
    python docs/research/benchmark.py training --lengths 512 2048 --output_file training.json --plot training.png
    python docs/research/benchmark.py training --ways "fused" "fused bf16"
    python docs/research/benchmark.py memory
    python docs/research/benchmark.py lengths --output_file lengths.json
    python docs/research/benchmark.py generation --contexts 512 4096 --models rpe modal gpt2
    python docs/research/benchmark.py streaming --lengths 65536 262144
    python docs/research/benchmark.py state_size
    python docs/research/benchmark.py long_range --models rpe transformer
    python docs/research/benchmark.py mixing
    python docs/research/benchmark.py products --ways rpe fd ski --bidirectional --decay 1 --lengths 2048 8192
    python docs/research/benchmark.py decoding --contexts 512 16384
    python docs/research/benchmark.py serving --hidden_size 256
    python docs/research/benchmark.py gpu --output_dir outputs/gpu
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from tnn_programs.cli.errors import report_errors

from suites.decoding import DOTS
from suites.peers import DEPTHS, FIELDS
from suites.plot import AXES, plot
from suites.record import measured

from modeling_tnn.configuration_tnn import DIRECTIONS
from modeling_tnn.extensions import IMPLEMENTATIONS
from tnn_programs.cli.atomic import check_writable, write_json
from tnn_programs.cli.parser import ProgramParser

MODELS = ["released", *DEPTHS, *IMPLEMENTATIONS, "hybrid", "attention", *DIRECTIONS]
MODELS += ["gpt2", "llama", "mamba", "mamba2"]
TNNS = ["rpe", "fd", "rtf", "modal", "rpe-no-decay", "hybrid", "attention"]
COMPILED = [f"{way} compiled" for way in (*IMPLEMENTATIONS, "gpt2", "llama")]
LONG = ["rpe", "rpe decayed", "fd", "rtf", "hyena", "gpt2", "llama", "mamba2"]

# Variants that each suite compares by default.
WAYS = {
    "training": [f"{way}{precision}" for precision in ("", " bf16") for way in (*MODELS, "matmul", *COMPILED)],
    "memory": MODELS,
    "generation": [f"{name}{end}" for name in (*TNNS, "gpt2", "mamba", "weights") for end in ("", "-columns")]
    + [f"{name}{end}-compiled" for name in TNNS for end in ("", "-columns")],
    "streaming": ["rpe", "fd", "rtf"],
    "long_range": [*(name for name in DIRECTIONS if name != "modal"),  # which is causal
                   "transformer", "reformer", "nystromformer", "fnet"],
    "mixing": ["toeplitz", "convolution", "recurrent", "attention", "linear attention", "mlp", "fourier",
               "state space", "coefficients"],
    # `fd twice` has a grid of twice the length.
    "products": ["released", "fd twice", *(f"{name}{twin}" for name in DIRECTIONS for twin in ("", " eager"))],
    "decoding": [*FIELDS, *DOTS],
    "serving": list(FIELDS),
    "gpu": ["losses", "steps", "decoding", "products"],
    "lengths": [f"{way}{end}" for way in LONG for end in ("", " compiled")],
}  # fmt: skip
DEFAULTS = {
    "training": ["released", "eager", "fused", "gpt2", "llama", "matmul"],
    "memory": ["released", "eager", "fused", "gpt2", "llama"],
    "generation": ["rpe", "fd", "rtf", "modal", "gpt2", "mamba", "weights"],
    "streaming": ["rpe"],
    "long_range": ["rpe", "fd", "ski", "rtf", "s4d", "transformer"],
    "mixing": WAYS["mixing"],
    "products": ["released", "rpe", "rpe eager"],
    "decoding": ["rpe-no-decay", "matmul", "vecdot"],
    "serving": ["rpe", "fd", "rtf", "modal"],
    "gpu": WAYS["gpu"],
    "lengths": LONG,
}
# The options of each suite with their defaults.
SIZES = {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}
BATCHES = {"lengths": [512, 2048, 8192], "tokens": 8192, "decay": 0.99}
OPTIONS = {
    "models": {"block_size": 512, "tokens": 2048, "bf16": False, "contexts": [512, 8192], "batch_size": 1},
    "training": {"ways": [], **BATCHES, **SIZES, "bidirectional": False, "blocks_only": False},
    "memory": {"ways": [], **BATCHES, **SIZES},
    # A repeat decodes a block of tokens, in rounds of 32.
    "generation": {"models": [], **SIZES, "num_hidden_layers": 6, "vocab_size": 50265, "contexts": [512, 16384],
                   "batch_size": 1, "block": 128},
    "streaming": {"ways": [], "hidden_size": 512, "num_hidden_layers": 1, "lengths": [65536, 262144], "segment": 8192},
    "state_size": {"hidden_size": 256, "state_sizes": [4, 16, 64, 256, 1024, 2048], "largest_scan": 256,
                   "length": [4096], "batch_size": 2},
    "long_range": {"models": [], "lengths": [1024, 2048, 3072, 4096, 5120], "batch_size": 1, "config_overrides": ""},
    "mixing": {"ways": [], "lengths": BATCHES["lengths"], "channels": 512, "batch_size": 1},
    "products": {"ways": [], **BATCHES, "hidden_size": 512, "bidirectional": False, "state_size": 64},
    "decoding": {"ways": [], "contexts": [512, 16384], "batch_size": 1, "hidden_size": 512},
    # `alone` of the `requests` are written by `generate` too; `prompts` have so many tokens, least and most.
    "serving": {"models": [], **SIZES, "num_hidden_layers": 6, "vocab_size": 10000, "requests": 32, "alone": 4,
                "prompts": [16, 64], "new_tokens": 128, "tokens_per_launch": [1]},
    # With `quick`, tiny sizes, in less than a minute on a CPU. No row begins after so many `minutes`.
    "gpu": {"parts": [], "output_dir": Path("outputs/gpu"), "quick": False, "minutes": 9.5},
    "lengths": {"ways": [], **SIZES, "num_hidden_layers": 6, "vocab_size": 50265, "memory": 12.0, "seconds": 300.0,
                "lengths": [8192, 32768, 131072, 524288, 1048576]},
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, options in OPTIONS.items():
        suite = suites.add_parser(name)
        suite.add_argument(
            "--repeats", type=int, default=10 if name == "gpu" else 3, help="Number of rounds; results are medians."
        )
        suite.add_argument("--device")
        suite.add_argument("--threads", type=int, default=1, help="CPU threads; with 1, CPU time is measured.")
        suite.add_argument("--output_file", type=Path)
        suite.set_defaults(plot=None)
        if name == "models":
            suite.add_argument("--model_name_or_path", nargs="+", required=True)
        if name == "lengths":
            suite.add_argument("--passes", nargs="+", choices=("step", "prefill"), default=["step", "prefill"])
        if name in AXES:
            suite.add_argument("--plot", type=Path, help="PNG file for a picture.")
        for option, default in options.items():
            if default == []:
                suite.add_argument(f"--{option}", nargs="+", choices=WAYS[name], default=DEFAULTS[name])
            elif isinstance(default, bool):
                suite.add_argument(f"--{option}", action="store_true")
            elif isinstance(default, list):
                suite.add_argument(f"--{option}", type=int, nargs="+", default=default)
            else:
                suite.add_argument(f"--{option}", type=type(default), default=default)
    return parser.parse_args()


@report_errors
def main():
    args = parse_arguments()
    for file in filter(None, (args.output_file, args.plot)):
        check_writable(file)
    suite = import_module(f"suites.{args.suite}")
    result = measured(suite, args)
    sys.stdout.write(suite.table(result["rows"]) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, result)
    if args.plot is not None:
        plot(args.suite, result["rows"], args.plot)


if __name__ == "__main__":
    main()
