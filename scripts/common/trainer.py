"""Training with transformers' Trainer that loses nothing when a signal stops it, or memory or disk are full."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import TrainingArguments

from tnn_scripts.common.atomic import SavingError, claim, saving_errors
from tnn_scripts.common.checkpoints import (
    check_run,
    find_checkpoint,
    prune,
    remove_incomplete,
    verify_checksums,
)
from tnn_scripts.common.devices import suggest_smaller
from tnn_scripts.common.grouping_trainer import GroupingTrainer, StopCallback, check_belonging, describe_training
from tnn_scripts.common.signals import StopRequest, StopRequested

logger = logging.getLogger("resumable")


@contextmanager
def output_folder(training: TrainingArguments, dry_run: bool) -> Iterator[None]:
    """Lock the output folder for the block. A dry run gets a temporary folder."""
    with contextlib.ExitStack() as held:
        if dry_run:
            training.output_dir = held.enter_context(TemporaryDirectory())
        else:
            held.enter_context(claim(Path(training.output_dir), main=training.process_index == 0))
        yield


def refuse_push(training: TrainingArguments):
    """Refuse Trainer's own publishing, which would upload pickles and no code.

    Raises:
        ValueError: `--push_to_hub` was given.
    """
    if training.push_to_hub:
        raise ValueError("--push_to_hub must not be given for this program: publish the trained model with tnn push")


def refuse_resume(training: TrainingArguments):
    """Refuse what a program that trains several models and keeps no checkpoint does not do.

    Raises:
        ValueError: `--push_to_hub` or `--resume_from_checkpoint` was given.
    """
    refuse_push(training)
    if training.resume_from_checkpoint is not None:
        raise ValueError(
            "--resume_from_checkpoint must not be given for this program: it always starts from the beginning"
        )


@contextmanager
def exit_with_message(training: TrainingArguments, overwrite: bool, dry_run: bool = False) -> Iterator[None]:
    """Lock the output folder for the block. If a signal stops the block, the process exits with status and message.

    Args:
        overwrite: whether `--overwrite_output_dir` was given.
        dry_run: whether what the block writes is thrown away.

    Raises:
        SystemExit: a signal stopped the block.
        ValueError: the folder cannot be used.
    """
    logger.setLevel(logging.INFO if training.process_index == 0 else logging.ERROR)
    try:
        refuse_push(training)
        with output_folder(training, dry_run):
            check_run(Path(training.output_dir), overwrite, training.resume_from_checkpoint)
            yield
    except StopRequested as request:
        status, message = request.args
        logger.info("%s Continue with --resume_from_checkpoint latest.", message)
        sys.exit(status)


def train(trainer: GroupingTrainer, labels: Sequence, **options) -> dict:
    """Train from the beginning, or from the checkpoint in the arguments; the figures of the training.

    Args:
        labels, options: the training data, see `describe_training`.

    Raises:
        StopRequested: a process got a signal during the training; the last step is in a checkpoint. The exception has
            the exit status and a message for the user.
        ValueError: the checkpoint is missing, damaged, or of another run.
        MemoryExceededError: a batch does not fit into memory.
        SavingError: a checkpoint could not be written.
    """
    folder = Path(trainer.args.output_dir)
    resumed, run = (
        find_checkpoint(folder, trainer.args.resume_from_checkpoint),
        describe_training(trainer, labels, **options),
    )
    if resumed is not None:
        verify_checksums(resumed)
        check_belonging(resumed, run)
    elif trainer.is_world_process_zero():
        prune(folder, 0)  # of a run that is overwritten: `latest` must not be one of them
    stop = StopRequest()
    leave = StopCallback(stop, run)
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
