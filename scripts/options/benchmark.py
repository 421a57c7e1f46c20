"""The options of `benchmark.py`: those of each suite, and the names of what it compares."""

import argparse
from pathlib import Path

from tnn_scripts.common.declared import declared_keys

OPERATORS = declared_keys("modeling_tnn.configuration_tnn", "DIRECTIONS")
IMPLEMENTATIONS = declared_keys("modeling_tnn.extensions", "IMPLEMENTATIONS")
ATTENTION = declared_keys("tnn_scripts.benchmarks.peers", "ATTENTION")
TNNS = [*declared_keys("tnn_scripts.benchmarks.generation", "TNN_FIELDS"), *ATTENTION]
MODELS = ["released", *IMPLEMENTATIONS, *ATTENTION, *OPERATORS, "gpt2", "llama", "mamba", "mamba2"]

# What each suite compares.
WAYS = {
    "operators": ["released", *(way for name in OPERATORS for way in (name, f"{name} eager"))],
    "training": [
        f"{way}{precision}"
        for precision in ("", " bf16")
        for way in (*MODELS, "matmul", *(f"{way} compiled" for way in (*IMPLEMENTATIONS, "gpt2", "llama")))
    ],
    "memory": MODELS,
    "generation": [*TNNS, *(f"{name}-compiled" for name in TNNS), "gpt2", "mamba", "weights"],
    "decoding": [
        *declared_keys("tnn_scripts.benchmarks.decoding", "FIELDS"),
        *declared_keys("tnn_scripts.benchmarks.decoding", "DOTS"),
    ],
    "serving": TNNS,
    "streaming": declared_keys("tnn_scripts.benchmarks.streaming", "FIELDS"),
    "long_range": [name for name in (*OPERATORS, "transformer") if name != "modal"],  # which is causal
    "alternatives": declared_keys("tnn_scripts.benchmarks.alternatives", "SUBJECTS"),
    "gpu": [
        *("losses", "steps", "decoding", "recipe", "products"),
        *(f"oracles-{name}" for name in ("triton", "fused", "eager")),
    ],
}
# What they compare unless told.
DEFAULTS = {
    "operators": ["released", "rpe", "rpe eager"],
    "training": ["released", "eager", "fused", "gpt2", "llama", "matmul"],
    "memory": ["released", "eager", "fused", "gpt2", "llama"],
    "generation": ["rpe", "fd", "rtf", "modal", "gpt2", "mamba", "weights"],
    "decoding": ["rpe-no-decay", "matmul", "vecdot"],
    "serving": ["rpe", "fd", "rtf", "modal"],
    "streaming": ["rpe"],
    "long_range": ["rpe", "fd", "ski", "rtf", "s4d", "transformer"],
}


def add_common(parser: argparse.ArgumentParser):
    """Add the arguments of every suite."""
    parser.add_argument("--repeats", type=int, default=3, help="Number of rounds; results are medians.")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; with 1, CPU time is measured.")
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG file for a picture.")


def add_ways(parser: argparse.ArgumentParser, suite: str, name: str = "--ways", text: str = "Variants to compare."):
    default = DEFAULTS.get(suite, WAYS[suite])
    parser.add_argument(name, nargs="+", choices=WAYS[suite], default=default, help=text)


def add_batches(parser: argparse.ArgumentParser):
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="Tokens in a sequence.")
    parser.add_argument("--tokens", type=int, default=8192, help="Tokens in a batch.")
    parser.add_argument("--decay", type=float, default=0.99, help="Decay of the kernels; 1 for none.")


def add_hidden_size(parser: argparse.ArgumentParser, hidden_size: int = 512):
    parser.add_argument("--hidden_size", type=int, default=hidden_size, help="Width of the models.")


def add_sizes(parser: argparse.ArgumentParser, num_hidden_layers: int, vocab_size: int):
    add_hidden_size(parser)
    parser.add_argument("--num_hidden_layers", type=int, default=num_hidden_layers, help="Number of layers.")
    parser.add_argument("--vocab_size", type=int, default=vocab_size, help="Size of the vocabulary.")


def add_contexts(parser: argparse.ArgumentParser):
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 16384], help="Tokens in the context.")
    parser.add_argument("--batch_size", type=int, default=1)


def add_operators(parser: argparse.ArgumentParser):
    add_ways(parser, "operators")
    add_batches(parser)
    add_hidden_size(parser)
    parser.add_argument("--bidirectional", action="store_true", help="Measure bidirectional operators.")
    parser.add_argument("--state_size", type=int, default=64, help="Order of the rtf operator.")


def add_training(parser: argparse.ArgumentParser):
    add_ways(parser, "training")
    add_batches(parser)
    add_sizes(parser, num_hidden_layers=2, vocab_size=1000)
    parser.add_argument("--bidirectional", action="store_true", help="Measure bidirectional models of the TNN.")
    parser.add_argument("--blocks_only", action="store_true", help="Leave out embeddings, head and loss.")


def add_memory(parser: argparse.ArgumentParser):
    add_ways(parser, "memory")
    add_batches(parser)
    add_sizes(parser, num_hidden_layers=2, vocab_size=1000)


def add_generation(parser: argparse.ArgumentParser):
    add_sizes(parser, num_hidden_layers=6, vocab_size=50265)
    add_contexts(parser)
    add_ways(parser, "generation", "--models", "Models to compare.")
    parser.add_argument("--block", type=int, default=128, help="Tokens in a repeat, in rounds of 32.")


def add_decoding(parser: argparse.ArgumentParser):
    add_ways(parser, "decoding")
    add_contexts(parser)
    add_hidden_size(parser)


def add_serving(parser: argparse.ArgumentParser):
    add_sizes(parser, num_hidden_layers=6, vocab_size=10000)
    add_ways(parser, "serving", "--models", "Models to compare.")
    parser.add_argument("--requests", type=int, default=32, help="Number of texts.")
    parser.add_argument("--alone", type=int, default=4, help="How many of them `generate` writes in a repeat.")
    parser.add_argument("--prompts", type=int, nargs=2, default=[16, 64], help="Least and most tokens of a prompt.")
    parser.add_argument("--new_tokens", type=int, default=128, help="Tokens that are written after a prompt.")


def add_streaming(parser: argparse.ArgumentParser):
    add_ways(parser, "streaming")
    add_hidden_size(parser)
    parser.add_argument("--num_hidden_layers", type=int, default=1, help="Number of layers.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144], help="Tokens in the text.")
    parser.add_argument("--segment", type=int, default=8192, help="Tokens in a segment.")


def add_models(parser: argparse.ArgumentParser):
    parser.add_argument("--model_name_or_path", required=True, nargs="+")
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="Tokens of a training step.")
    parser.add_argument("--bf16", action="store_true", help="Train under autocast in bfloat16.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192], help="Tokens before a new one.")
    parser.add_argument("--batch_size", type=int, default=1, help="Sequences that are decoded at once.")


def add_state_size(parser: argparse.ArgumentParser):
    add_hidden_size(parser, 256)
    parser.add_argument(
        "--state_sizes", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 2048], help="State sizes."
    )
    parser.add_argument("--largest_scan", type=int, default=256, help="Largest state size of the scan.")
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="Lengths of a sequence.")
    parser.add_argument("--batch_size", type=int, default=2)


def add_long_range(parser: argparse.ArgumentParser):
    add_ways(parser, "long_range", "--models", "Models to compare.")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 3072, 4096, 5120], help="Tokens in a sequence."
    )
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--config_overrides", help="Fields of the configuration to change: hidden_size=48.")


def add_alternatives(parser: argparse.ArgumentParser):
    add_ways(parser, "alternatives", "--subjects", "What to compare.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="Tokens in a sequence.")
    parser.add_argument("--channels", type=int, default=64, help="Number of channels.")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=64, help="Largest number of inducing points.")


def add_gpu(parser: argparse.ArgumentParser):
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, in less than a minute on a CPU.")
    add_ways(parser, "gpu", "--parts", "Parts to run.")
    parser.set_defaults(repeats=10)
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="Parts that begin or last beyond this are left out."
    )


ADD = {
    "operators": add_operators,
    "training": add_training,
    "memory": add_memory,
    "generation": add_generation,
    "decoding": add_decoding,
    "serving": add_serving,
    "streaming": add_streaming,
    "models": add_models,
    "state_size": add_state_size,
    "long_range": add_long_range,
    "alternatives": add_alternatives,
    "gpu": add_gpu,
}
