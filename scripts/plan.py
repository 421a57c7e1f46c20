"""Estimate whether a training step fits into the memory of a GPU, and how many tokens a second it trains.

Needs no GPU. Memory is counted in a step on tensors without values; a step fits if it takes at most nine tenths of
--device_memory. Speed is an estimate: --model_flop_use of the peak of --gpu, without communication.

With --read, a step is one pass without gradients of a model in --dtype, on a GPU or, with --use_cpu, on a CPU.

ddp has a copy of the model on each of --processes GPUs and fsdp2 a shard, each with --per_device_train_batch_size
sequences; sp divides sequences over the GPUs, which share them.

Example:
    python scripts/plan.py --config_name tnn-causal --lengths 2048 32768 --mixed_precision bf16 --device_memory 80
    python scripts/plan.py --config_name tnn-causal --lengths 131072 --read --dtype bfloat16
    python scripts/plan.py --config_overrides hidden_size=4096,num_hidden_layers=32 --processes 1 8 --device_memory 80
"""

import argparse
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import check_writable
from tnn_programs.cli.declared import NAMES
from tnn_programs.cli.model_path import find_config
from tnn_programs.cli.parser import ProgramParser
from tnn_programs.cli.training_arguments import OBJECTIVES, OPTIMIZERS

ENGINES = NAMES["tnn_programs.training.plan.ENGINES"]
GPUS = NAMES["tnn_programs.training.costs.PEAKS"]


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--objective", choices=OBJECTIVES, default="clm")
    parser.add_argument("--config_name", default="tnn-causal")
    parser.add_argument("--config_overrides")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="Numbers of GPUs.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="How GPUs share the work.")
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--read", action="store_true", help="Plan reading in place of training.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw_torch_fused")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--device_memory", type=float, help="GiB of a GPU.")
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="GPU whose peak the speed is estimated from.")
    use = "Share of that peak that a training reaches, as metrics.json of `tnn pretrain` has it."
    parser.add_argument("--model_flop_use", type=float, default=0.25, help=use)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    for name, least, given in (("lengths", 2, args.lengths), ("processes", 1, args.processes)):
        if min(given) < least:
            parser.error(f"--{name} must be at least {least}, got {min(given)}")
    if args.read and max(args.processes) > 1 or args.use_cpu > args.read:
        parser.error("--read must be on with --use_cpu, and off with several --processes")
    find_config(args.config_name)  # before anything slow
    if args.output_file is not None:
        check_writable(args.output_file)
    return args


@report_errors
def main():
    args = parse_arguments()
    with importing("training"):
        from tnn_programs.training.plan import run
    run(args)


if __name__ == "__main__":
    main()
