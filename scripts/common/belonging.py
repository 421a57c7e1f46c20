"""What makes a run of Trainer the one that a checkpoint belongs to: model, data, optimisation and global batch.

For the loop of `pretrain.py` see `fingerprint.py`.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainingArguments

from tnn_scripts.common.atomic import write_json
from tnn_scripts.common.optimizers import GroupingTrainer

FILE = "run.json"
# The options of Trainer that change the weights. The end of the run may change: --max_steps or --num_train_epochs.
COMPARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "optim_args", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "seed",
    "data_seed", "train_sampling_strategy", "bf16", "fp16",
)  # fmt: skip
OF_MODEL = {"transformers_version", "_name_or_path"}


def rows_of_a_step(args: TrainingArguments) -> int:
    """The rows that one step of the optimizer sees, those of all processes together."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def describe_run(trainer: GroupingTrainer, labels: Sequence, **options) -> dict:
    """What a checkpoint must agree with.

    Args:
        labels: the classes or values of all training rows, which identify the data.
        options: settings of the program that change what is read of a row.
    """
    args = trainer.args.to_dict()
    model = {f"config.{k}": v for k, v in trainer.model.config.to_dict().items() if k not in OF_MODEL}
    batch = rows_of_a_step(trainer.args)
    data = {"rows": len(labels), "labels": hashlib.sha256(json.dumps(list(labels)).encode()).hexdigest()[:16]}
    run = {name: args.get(name) for name in COMPARED} | {"groups": trainer.groups, "batch": batch}
    return json.loads(json.dumps(run | options | data | model))


def check_belonging(checkpoint: Path, run: dict):
    """Refuse a checkpoint of another run. What one of an older version does not describe is not compared.

    Raises:
        ValueError: it differs, with a line for each difference.
    """
    if not (checkpoint / FILE).is_file():
        return
    saved = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
    differing = [f"{n} must be {saved[n]}, got {v}" for n, v in run.items() if n in saved and saved[n] != v]
    if differing:
        raise ValueError("\n  ".join([f"{checkpoint} is a checkpoint of another run.", *differing]))


def write_run(checkpoint: Path, run: dict):
    """Write the description of the run into one of its checkpoints."""
    write_json(checkpoint / FILE, run)
