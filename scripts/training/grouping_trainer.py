"""Trainer as all programs of fine-tuning use it: groups of parameters, and stops by signals."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import Trainer, TrainerCallback, TrainingArguments

from tnn_programs.cli.runs import describe_run, write_checksums
from tnn_programs.training.optimizers import regroup
from tnn_programs.training.passes import warn_of_bfloat16
from tnn_programs.training.processes import StopRequest


class GroupingTrainer(Trainer):
    """Trainer with parameters that have settings of their own, see `GroupArguments.groups`.

    It saves the `use_cache` that the model had before, where it had one; Trainer sets it to False. A language model
    skips its logits in training.
    """

    def __init__(self, model, *arguments, groups: dict[str, dict[str, float]] | None = None, **options):
        config = getattr(model, "config", None)  # a plain module has none
        self.saved_cache = {"use_cache": config.use_cache} if hasattr(config, "use_cache") else {}
        if hasattr(config, "skip_logits"):
            config.skip_logits = True
        super().__init__(model, *arguments, **options)
        self.groups = groups or {}
        on_cpu = self.args.device.type == "cpu"
        self.args.dataloader_pin_memory &= not on_cpu  # else PyTorch warns
        self.args.logging_nan_inf_filter &= on_cpu  # for it Trainer reads each loss, which an accelerator waits for
        if self.args.bf16:
            warn_of_bfloat16(self.args.device, "--bf16 false")

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer, own = super().create_optimizer(model), self.model if model is None else model
            regroup(optimizer, own, self.groups, set(self.get_decay_parameter_names(own)))
        return self.optimizer

    def _save(self, *arguments, **options):
        if not hasattr(self.model, "config"):
            return super()._save(*arguments, **options)
        fields = vars(self.model.config)
        present = {"use_cache": fields.pop("use_cache")} if "use_cache" in fields else {}
        fields |= self.saved_cache
        try:
            super()._save(*arguments, **options)
        finally:
            fields |= present


class StopCallback(TrainerCallback):
    """A callback that ends a Trainer's run with a checkpoint, after the step in which a process got a signal.

    Trainer's own `enable_jit_checkpoint` saves before the optimizer's step, and each process at another step. After it
    the run looks finished. Checkpoints have `run`, which `describe_training` returns.
    """

    def __init__(self, stop: StopRequest, run: dict):
        self.stop, self.run, self.stopped = stop, run, False

    def on_step_end(self, args, state, control, **kwargs):
        asked = torch.tensor(float(self.stop.signal != 0))
        if args.world_size > 1:
            asked = reduce(asked.to(args.device), reduction="sum")
        self.stopped = asked.item() > 0
        if self.stopped:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process writes its random states
        if state.is_world_process_zero:
            write_checksums(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.run)


def rows_of_a_step(args: TrainingArguments) -> int:
    """The rows that one step of the optimizer sees, those of all processes together."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def describe_training(trainer: GroupingTrainer, labels: Sequence, **options) -> dict:
    """Return the run identity of a checkpoint: the labels of all rows, and options that change how a row is read."""
    data = {"rows": len(labels), "labels": hashlib.sha256(json.dumps(list(labels)).encode()).hexdigest()[:16]}
    run = {"groups": trainer.groups, "batch": rows_of_a_step(trainer.args)} | options | data
    return describe_run(trainer.args.to_dict(), trainer.model.config, **run)
