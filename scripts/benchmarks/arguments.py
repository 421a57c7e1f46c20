"""Arguments that several suites of `benchmark.py` share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def add_common(parser: argparse.ArgumentParser):
    """Add the arguments of every suite."""
    parser.add_argument("--repeats", type=int, default=3, help="Number of rounds; results are medians.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; with 1, CPU time is measured.")
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG file for a picture.")


def add_ways(parser: argparse.ArgumentParser, ways: Sequence[str], default: Sequence[str]):
    parser.add_argument("--ways", nargs="+", choices=ways, default=default, help="Variants to compare.")


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
