"""Arguments that several suites of `benchmark.py` have."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def add_common(parser: argparse.ArgumentParser):
    """What every suite has."""
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU; with 1, CPU time is measured")
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--plot", type=Path, help="where to write a picture (PNG)")


def add_ways(parser: argparse.ArgumentParser, ways: Sequence[str], default: Sequence[str]):
    parser.add_argument("--ways", nargs="+", choices=ways, default=default, help="what to compare")


def add_batches(parser: argparse.ArgumentParser):
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="in a batch")
    parser.add_argument("--decay", type=float, default=0.99)


def add_sizes(parser: argparse.ArgumentParser, num_hidden_layers: int, vocab_size: int):
    parser.add_argument("--num_hidden_layers", type=int, default=num_hidden_layers)
    parser.add_argument("--vocab_size", type=int, default=vocab_size)


def add_contexts(parser: argparse.ArgumentParser):
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 16384], help="tokens seen before")
    parser.add_argument("--batch_size", type=int, default=1)
