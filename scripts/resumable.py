"""Trainer's training as pretrain.py does its own: stopped by a signal, out of memory or disk, it loses nothing."""

from pathlib import Path

from checkpoints import find_checkpoint, remove_incomplete, verify_checksums
from interruption import StopCallback, StopRequest, StopRequested
from memory import suggest_smaller
from outputs import SavingError, saving_errors
from transformers import Trainer


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
