"""Training steps per second of classifiers by length: TNN variants and a transformer (TNN paper, table 5).

All models have the width and depth of the preset for byte-level text. The transformer has as many parameters in a
layer. Every repeat measures all models once.
"""

import argparse
import statistics
from functools import partial

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from modeling_tnn.tno_auto import OPERATORS
from tnn_scripts.benchmarks.measure import measure
from tnn_scripts.common.arguments import load_config
from tnn_scripts.common.peers import modernbert_like
from tnn_scripts.common.tables import markdown_table

WAYS = (*(name for name, cls in OPERATORS.items() if cls.supports_bidirectional), "transformer")
DEFAULT_WAYS = ("rpe", "fd", "ski", "rtf", "transformer")
PRESET = "tnn-text"


def classifier(way: str, length: int, device: str) -> PreTrainedModel:
    """A classifier for `length` tokens: the preset with another operator, or a transformer of its size."""
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": length, "hidden_dropout_prob": 0.0}
    sizes |= {"rtf_num_denominators": 1, "rtf_state_size": 4}
    config = load_config(PRESET, sizes, {"tno_type": "rpe" if way == "transformer" else way})
    config = modernbert_like(config) if way == "transformer" else config
    return AutoModelForSequenceClassification.from_config(config).train().to(device)


def training_step(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor):
    model(ids, labels=labels).loss.backward()


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--models", nargs="+", choices=WAYS, default=DEFAULT_WAYS, help="Models to compare.")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 3072, 4096, 5120], help="Tokens in a sequence."
    )
    parser.add_argument("--batch_size", type=int, default=1)


def run(args) -> list[dict]:
    """One row for each model and length: forward, loss and backward of `batch_size` sequences."""
    rows = []
    for length in args.lengths:
        models = {way: classifier(way, length, args.device) for way in args.models}
        vocabulary = next(iter(models.values())).config.vocab_size
        ids = torch.randint(vocabulary, (args.batch_size, length), device=args.device)
        labels = torch.randint(2, (args.batch_size,), device=args.device)
        ways = {way: partial(training_step, model, ids, labels) for way, model in models.items()}
        for way, seconds in measure(ways, args).items():
            rows.append(
                {
                    "way": way,
                    "length": length,
                    "steps_per_second": 1 / statistics.median(seconds),
                    "parameters": models[way].num_parameters(),
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """A Markdown table with a line for each model and a column for each length."""
    lengths = sorted({row["length"] for row in rows})
    speeds = {(row["way"], row["length"]): row["steps_per_second"] for row in rows}
    ways = dict.fromkeys(row["way"] for row in rows)
    lines = ([way, *(f"{speeds[way, length]:.2f}" for length in lengths)] for way in ways)
    return markdown_table(["model", *map(str, lengths)], lines)
