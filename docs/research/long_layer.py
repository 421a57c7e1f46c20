"""Measure what one layer of each kind of Evo 2 takes to read a long sequence, beside what `tnn plan --read` states.

A layer has random weights in bfloat16, and its block a GLU. Memory is that beside the weights, as a multiple of the
activations, which are L d numbers of two bytes: what is planned for a CPU, what PyTorch's operations made at most, and
how far the resident memory of the process grew. A layer of each kind is measured in a process of its own.

Example:
    OMP_NUM_THREADS=1 python docs/research/long_layer.py --output_file outputs/long-layer.json
"""

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from suites.device import resident_peak

from modeling_tnn import TnnConfig
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.training.plan import PeakMemory, count_reading, reading

GROUPS_OF_16 = 16  # channels that share a filter, as 4,096 channels share 256
LAYERS = {
    "7 taps": {"tno_type": "explicit", "explicit_length": 7},
    "128 taps": {"tno_type": "explicit", "explicit_length": 128, "hyena_skip": True},
    "16 exponentials": {"tno_type": "exponential", "num_modes": 16, "hyena_skip": True},
    "attention": {"layer_types": ["full_attention"]},
}


def config_of(layer: str, width: int) -> TnnConfig:
    """The configuration of a model of one layer with the proportions of Evo 2."""
    fields = LAYERS[layer]
    if layer == "attention":
        rotary = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 128.0}
        fields = fields | {"num_attention_heads": width // 128, "rope_parameters": rotary}
    elif layer != "16 exponentials":
        fields = fields | {"num_filter_groups": width // GROUPS_OF_16}
    return TnnConfig(
        vocab_size=512, hidden_size=width, num_hidden_layers=1, intermediate_size=11 * width // 4, hidden_act="linear",
        toeplitz_mixer="hyena", gtu_expansion=1, norm_type="rmsnorm", final_norm_type="rmsnorm", rms_norm_eps=1e-6,
        output_biases_only=True, scale_embedding=False, hidden_dropout_prob=0.0, **fields,
    )  # fmt: skip


def measure(layer: str, length: int, width: int) -> dict:
    """The figures of a layer: memory over that of the activations, and seconds."""
    torch.manual_seed(0)
    args = PretrainArguments(block_size=length, per_device_train_batch_size=1, learning_rate=1e-3)
    config, unit = config_of(layer, width), 2 * length * width
    planned = count_reading(args, config, torch.bfloat16, on_cpu=True)
    step, memory = reading(args, config, torch.bfloat16), PeakMemory()
    next(step)
    with memory:
        model = next(step)
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.normal_(std=0.02) if "log_poles" not in name else one.uniform_(-1, -1e-4)
        memory.peak = weights = memory.now
        resident, start = resident_peak(), time.perf_counter()
        next(step)
        seconds = time.perf_counter() - start
    return {
        "layer": layer,
        "planned": (planned["peak"] - planned["weights"]) / unit,
        "counted": (memory.peak - weights) / unit,
        "resident": (resident_peak() - resident) / unit,
        "cache": planned["cache"] / unit,
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    rows = []
    for layer in args.layers:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (layer, args.length, args.hidden_size)))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    if args.output_file is not None:
        args.output_file.parent.mkdir(parents=True, exist_ok=True)
        args.output_file.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
