"""Trainer's training as pretrain.py does its own: stopped by a signal, out of memory or disk, it loses nothing."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import Trainer, TrainingArguments

from tnn_scripts.common.atomic import SavingError, claim, saving_errors
from tnn_scripts.common.checkpoints import (
    check_run,
    find_checkpoint,
    remove_checkpoints,
    remove_incomplete,
    verify_checksums,
)
from tnn_scripts.common.devices import suggest_smaller
from tnn_scripts.common.signals import StopCallback, StopRequest, StopRequested

logger = logging.getLogger("resumable")


@contextmanager
def output_folder(training: TrainingArguments, dry_run: bool) -> Iterator[None]:
    """Have the output folder for the block, or, for a dry run, a temporary one."""
    with contextlib.ExitStack() as held:
        if dry_run:
            training.output_dir = held.enter_context(TemporaryDirectory())
        else:
            held.enter_context(claim(Path(training.output_dir), main=training.process_index == 0))
        yield


@contextmanager
def exit_with_message(training: TrainingArguments, overwrite: bool, dry_run: bool = False) -> Iterator[None]:
    """Have the output folder for the block; a signal that stops it ends the process with a status and a sentence.

    Args:
        overwrite: whether `--overwrite_output_dir` was given.
        dry_run: whether what the block writes is thrown away.

    Raises:
        SystemExit: the block was stopped by a signal.
        ValueError: the folder is not to be written to.
    """
    logger.setLevel(logging.INFO if training.process_index == 0 else logging.ERROR)
    try:
        if training.push_to_hub:  # Trainer's own would publish pickles and no code
            raise ValueError("--push_to_hub: publish the folder with scripts/push_to_hub.py when it is trained.")
        with output_folder(training, dry_run):
            check_run(Path(training.output_dir), overwrite, training.resume_from_checkpoint)
            yield
    except StopRequested as request:
        status, message = request.args
        logger.info("%s --resume_from_checkpoint latest goes on from there.", message)
        sys.exit(status)


def train(trainer: Trainer) -> dict:
    """Figures of the training, from the beginning or from the checkpoint that its arguments name.

    Raises:
        StopRequested: a process had a signal while it trained; the last step is in a checkpoint. It has the status to
            leave with and a sentence for the user.
        ValueError: there is no such checkpoint to go on from, or it is damaged.
        MemoryExceededError, SavingError: a batch does not fit, or a checkpoint.
    """
    folder, resumed = Path(trainer.args.output_dir), trainer.args.resume_from_checkpoint
    if resumed is not None:
        resumed = find_checkpoint(folder, resumed)
        verify_checksums(resumed)
    elif trainer.is_world_process_zero():
        remove_checkpoints(folder)  # of a run that is to be overwritten: `latest` must not mean one of them
    stop = StopRequest()
    leave = StopCallback(stop)
    trainer.add_callback(leave)
    advice = "give a smaller --per_device_train_batch_size with more --gradient_accumulation_steps"
    try:
        with stop, suggest_smaller("training", advice), saving_errors(folder):
            figures = trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed)).metrics
    except SavingError:
        if trainer.is_world_process_zero():
            remove_incomplete(folder)
        raise
    if leave.stopped:
        raise StopRequested(stop.status, f"stopped by a signal; step {trainer.state.global_step} is saved.")
    return figures
