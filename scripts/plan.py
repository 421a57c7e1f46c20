"""Count memory and communication of a training step on several devices, without the devices.

The step runs in this process as one of --processes, with the code of each engine, on tensors without memory. A row has
GiB on a device when most is taken, by part, the same on all devices, and GiB that a device sends to others in a step.
Not counted: what libraries take besides tensors (CUDA, NCCL, workspaces), and what the allocator cannot use of its
pieces.

ddp has a copy of the model on each device, fsdp2 shards of it, tp parts of each layer, and sp parts of each text; each
device has --per_device_train_batch_size texts with ddp and fsdp2, and all together have them with the others.

Example:
    python scripts/plan.py --config_name tnn-causal --lengths 2048 32768 --processes 8 --mixed_precision bf16
    python scripts/plan.py --config_overrides hidden_size=4096,num_hidden_layers=32 --engines fsdp2 --device_memory 72
    torchrun --nproc_per_node 4 scripts/plan.py --config_name tnn-tiny --lengths 4096 --engines fsdp2 sp --measure
"""

import argparse
import os
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import check_writable
from tnn_scripts.common.declared import declared_keys
from tnn_scripts.common.names import find_config
from tnn_scripts.common.optimizer_arguments import OPTIMIZERS
from tnn_scripts.common.parser import ProgramParser, check_counts

ENGINES = declared_keys("tnn_scripts.planning.engines", "ENGINES")


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--config_name", default="tnn-causal")
    parser.add_argument("--config_overrides")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="How a model is divided.")
    started = int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--processes", type=int, default=started if started > 1 else 8, help="Number of devices.")
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw_torch_fused")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--device_memory", type=float, help="GiB of a device: find how many devices do.")
    measured = "Do the step in real processes too, started by torchrun, and show what it takes of their memory."
    parser.add_argument("--measure", action="store_true", help=measured)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    check_counts(args, "processes", "per_device_train_batch_size")
    args.config_name = find_config(args.config_name)
    if min(args.lengths) < 2:
        parser.error(f"--lengths must be at least 2, got {min(args.lengths)}")
    if args.measure and args.processes != started:
        parser.error(f"--processes must be the number that torchrun has started, {started}, got {args.processes}")
    return args


@report_errors
def main():
    args = parse_arguments()
    if args.output_file is not None:
        check_writable(args.output_file)
    with importing("scripts"):
        from tnn_scripts.runs.plan import run
    run(args)


if __name__ == "__main__":
    main()
