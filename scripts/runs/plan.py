"""Count the memory and the communication of training steps on several devices."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator

import torch

from modeling_tnn.configuration_tnn import LENGTH_FIELDS
from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.common.atomic import write_json
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.planning.engines import ENGINES, build_model
from tnn_scripts.planning.recorder import PARTS
from tnn_scripts.planning.steps import Settings, count, measure_all

GIB = 2**30
MOST = 256


def configuration(name: str, overrides: str | None, length: int):
    """The configuration of a model for texts of `length`."""
    changed = parse_overrides(overrides)
    config = load_config(name, changed)
    if config.model_type != "tnn":
        raise ValueError(f"--config_name must be a TNN, got {config.model_type}")
    if length <= config.max_position_embeddings or "max_position_embeddings" in changed:
        return config
    # The fields that follow from this number must be derived again.
    derived = {field: changed.get(field) for field in LENGTH_FIELDS}
    return load_config(name, changed | derived | {"max_position_embeddings": length})


def plans(args: argparse.Namespace) -> Iterator[Settings]:
    for length in args.lengths:
        for engine in args.engines:
            yield Settings(
                configuration(args.config_name, args.config_overrides, length),
                length,
                engine,
                args.processes,
                args.per_device_train_batch_size,
                args.mixed_precision,
                args.optim,
                args.gradient_checkpointing,
            )


def fewest_devices(plan: Settings, peak: int, memory: float) -> int | None:
    """The fewest devices of which each needs at most `memory` bytes; None if more of them do not help.

    Args:
        peak: the bytes that the devices of `plan` need, which are doubled or halved.
    """
    if plan.engine == "ddp":
        return 1 if peak <= memory else None
    fits, devices = peak <= memory, plan.processes
    while True:
        other = devices // 2 if fits else 2 * devices
        if not 1 <= other <= MOST:
            return devices if fits else None
        before, peak = peak, count(dataclasses.replace(plan, processes=other))["peak"]
        if fits and peak > memory:
            return devices
        if not fits and (peak <= memory or peak > 0.9 * before):
            return other if peak <= memory else None
        devices = other


def row_of(plan: Settings, found: dict) -> dict:
    """What is known of a step, as a row of the JSON file."""
    tokens = plan.length * plan.batch * (plan.processes if ENGINES[plan.engine].texts else 1)
    about = {"engine": plan.engine, "processes": plan.processes, "length": plan.length, "tokens": tokens}
    return about | found["parts"] | {name: value for name, value in found.items() if name != "parts"}


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    extra = [name for name in ("measured_peak", "fewest_devices") if any(name in row for row in rows)]
    lines = [
        [row["engine"], *(f"{row[name]:,}" for name in ("processes", "length", "tokens"))]
        + [f"{row[part] / GIB:,.3f}" for part in (*PARTS, "peak")]
        + [f"{number / GIB:,.3f}" for number in (row["processes"] * row["peak"], row["sent_bytes"])]
        + [shown(name, row.get(name)) for name in extra]
        for row in rows
    ]
    heads = ["engine", "devices", "length", "tokens", *PARTS, "peak", "all devices", "sent per step", *extra]
    return markdown_table([head.replace("_", " ") for head in heads], lines)


def heading(args: argparse.Namespace) -> str:
    """What the table counts, in which units, and with which settings."""
    config = configuration(args.config_name, args.config_overrides, args.lengths[0])
    with torch.device("meta"):
        parameters = build_model(config, False).num_parameters()
    precision = "bfloat16 autocast" if args.mixed_precision == "bf16" else "float32"
    saving = "with" if args.gradient_checkpointing else "without"
    return (
        f"{args.config_name}: {parameters:,} parameters; --processes {args.processes}, --per_device_train_batch_size "
        f"{args.per_device_train_batch_size}, {precision}, --optim {args.optim}, {saving} gradient checkpointing.\n"
        "Memory in GiB per device at the peak of a training step: the parts add up to the peak. `all devices` is the "
        "peak of\nall of them together, `sent` what a device sends to others in a step, in GiB; `tokens` are those of "
        "a step on all devices.\n\n"
    )


def shown(name: str, value: int | None) -> str:
    if value is None:
        return "none"
    return f"{value / GIB:,.3f}" if name == "measured_peak" else f"{value:,}"


def run(args: argparse.Namespace):
    """Count the memory of all plans, and write them as a table."""
    first, rows = int(os.environ.get("RANK", 0)) == 0, []
    for plan in plans(args) if first else ():
        rows.append(row_of(plan, count(plan)))
        if args.device_memory is not None:
            rows[-1]["fewest_devices"] = fewest_devices(plan, rows[-1]["peak"], args.device_memory * GIB)
    if args.measure:
        measured = measure_all(list(plans(args)))
        rows = [row | {f"measured_{name}": value for name, value in one.items()}
                for row, one in zip(rows, measured, strict=False)]  # fmt: skip
    if not first:
        return
    sys.stdout.write(heading(args) + table(rows) + "\n")
    if args.output_file is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output_file"}
        write_json(args.output_file, {"settings": settings, "versions": {"torch": torch.__version__}, "rows": rows})
