"""Training steps per second and memory of classifiers by length: TNN variants and transformers (TNN paper, table 5).

All models have the width and depth of the preset for byte-level text. The transformer has as many parameters in a
layer; Reformer, Nystroemformer and FNet are transformers' with its heads and MLP. Every repeat measures all models
once. The memory is what a forward pass saves for its backward pass, parameters excluded; on a GPU also the peak of a
step.
"""

import statistics
from functools import partial

import torch
from suites.device import peak_on_device
from suites.memory import saved_bytes
from transformers import (
    AutoModelForSequenceClassification,
    FNetConfig,
    NystromformerConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ReformerConfig,
)

from modeling_tnn.configuration_tnn import TnnConfig
from tnn_programs.benchmarks.measure import measure, ratio
from tnn_programs.cli.parser import load_config, parse_overrides
from tnn_programs.cli.tables import markdown_table
from tnn_programs.training.peers import modernbert_like

PRESET = "tnn-text"
LANDMARKS, CHUNK = 64, 64  # of Nystroemformer, and of Reformer's attention


def transformer(kind: str, config: TnnConfig) -> PreTrainedConfig:
    """A transformer of the sizes of a TNN: with softmax attention, or of a kind of `OTHERS`."""
    full = modernbert_like(config)
    if kind == "transformer":
        return full
    sizes = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "pad_token_id": 0}
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        sizes[name] = getattr(full, name)
    return OTHERS[kind](sizes | {"intermediate_size": 3 * full.intermediate_size // 2})  # without ModernBERT's gate


def reformer(sizes: dict) -> ReformerConfig:
    sizes |= {"feed_forward_size": sizes["intermediate_size"], "axial_pos_embds": False, "is_decoder": False}
    sizes |= {"attention_head_size": sizes["hidden_size"] // sizes["num_attention_heads"]}
    sizes |= {"lsh_attention_probs_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
    layers = ["lsh"] * sizes.pop("num_hidden_layers")
    return ReformerConfig(**sizes, attn_layers=layers, lsh_attn_chunk_length=CHUNK)


def nystromformer(sizes: dict) -> NystromformerConfig:
    length = sizes["max_position_embeddings"]
    return NystromformerConfig(
        **sizes, attention_probs_dropout_prob=0.0, num_landmarks=LANDMARKS, segment_means_seq_len=length
    )


OTHERS = {"reformer": reformer, "nystromformer": nystromformer, "fnet": lambda sizes: FNetConfig(**sizes)}
TRANSFORMERS = ("transformer", *OTHERS)


def classifier(way: str, length: int, args) -> PreTrainedModel:
    """A classifier for `length` tokens: the preset with another operator, or a transformer of its sizes.

    Raises:
        ValueError: an override is not a field of the configuration, or has a value outside its limits.
    """
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": length, "hidden_dropout_prob": 0.0}
    sizes |= {"rtf_num_denominators": 1, "rtf_state_size": 4}
    fields = parse_overrides(args.config_overrides) | {"tno_type": "rpe" if way in TRANSFORMERS else way}
    config = load_config(PRESET, sizes, fields)
    config = transformer(way, config) if way in TRANSFORMERS else config
    return AutoModelForSequenceClassification.from_config(config).train().to(args.device)


def training_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=labels).loss


def run(args) -> list[dict]:
    """One row for each model and length: forward, loss and backward of `batch_size` sequences."""
    rows = []
    for length in args.lengths:
        models = {way: classifier(way, length, args) for way in args.models}
        vocabulary = next(iter(models.values())).config.vocab_size
        ids = torch.randint(vocabulary, (args.batch_size, length), device=args.device)
        labels = torch.randint(2, (args.batch_size,), device=args.device)
        losses = {way: partial(training_loss, model, ids, labels) for way, model in models.items()}
        ways = {way: lambda loss=loss: loss().backward() for way, loss in losses.items()}
        times = measure(ways, args)
        for way, seconds in times.items():
            rows.append(
                {
                    "way": way,
                    "length": length,
                    "steps_per_second": 1 / statistics.median(seconds),
                    "over_first": ratio(times[args.models[0]], seconds),
                    "saved_mebibytes": saved_bytes(losses[way], models[way].parameters()) / 2**20,
                    "parameters": models[way].num_parameters(),
                }
                | peak_on_device(ways[way], args)
            )
    return rows


def table(rows: list[dict]) -> str:
    """A Markdown table with a line for each model, and for each length a column of steps per second and one of MiB."""
    lengths = sorted({row["length"] for row in rows})
    speeds = {(row["way"], row["length"]): f"{row['steps_per_second']:.2f}" for row in rows}
    kept = {(row["way"], row["length"]): f"{row['saved_mebibytes']:.0f}" for row in rows}
    ways = dict.fromkeys(row["way"] for row in rows)
    lines = ([way, *(cells[way, length] for cells in (speeds, kept) for length in lengths)] for way in ways)
    return markdown_table(["model", *map(str, lengths), *(f"{length}, MiB" for length in lengths)], lines)
