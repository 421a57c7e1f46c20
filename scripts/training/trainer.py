"""Training with transformers' Trainer that loses nothing when a signal stops it, or memory or disk are full.

A program that trains one classifier is a `classifier_run` with `train_classifier` in it. `comparing.py` has several.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tnn_programs.cli.errors import suggest_smaller

import numpy as np
import torch
from datasets import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from tnn_programs.cli import runs
from tnn_programs.cli.atomic import SavingError, claim, new_files, saving_errors, write_json
from tnn_programs.cli.commands import next_steps
from tnn_programs.cli.task_arguments import ClassifierArguments
from tnn_programs.training.grouping_trainer import GroupingTrainer, StopCallback, describe_training, rows_of_a_step
from tnn_programs.training.processes import StopRequest, StopRequested

logger = logging.getLogger("resumable")
# Trainer's own publishing would upload pickles and no code. Who trains several models keeps no checkpoint.
REFUSED = {
    "push_to_hub": "publish the trained model with tnn push",
    "resume_from_checkpoint": "it always starts from the beginning",
}


def output_folder(training: TrainingArguments) -> AbstractContextManager[Path]:
    """Lock the output folder for the block."""
    return claim(Path(training.output_dir), main=training.process_index == 0)


def refuse(training: TrainingArguments, *names: str):
    """Refuse options of Trainer, by a ValueError."""
    for name in names:
        if getattr(training, name):
            raise ValueError(f"--{name} must not be given for this program: {REFUSED[name]}")


def train(trainer: GroupingTrainer, labels: Sequence, **options) -> dict:
    """Train from the beginning, or from the checkpoint in the arguments; the figures of the training.

    `labels` and `options` are those of `describe_training`. After a signal the last step is in a checkpoint, and
    StopRequested has the exit status and a message for the user.
    """
    folder = Path(trainer.args.output_dir)
    resumed = runs.find_checkpoint(folder, trainer.args.resume_from_checkpoint)
    run = describe_training(trainer, labels, **options)
    if resumed is not None and (resumed / runs.RUN).is_file():
        runs.check_same_run(resumed, runs.read_object(resumed / runs.RUN), run)
    if trainer.is_world_process_zero():
        runs.remove_others(folder, resumed)
    stop = StopRequest()
    leave = StopCallback(stop, run)
    trainer.add_callback(leave)
    advice = "give a smaller --per_device_train_batch_size with more --gradient_accumulation_steps"
    try:
        with stop, suggest_smaller("training", advice), saving_errors(folder):
            figures = trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed)).metrics
    except SavingError:
        if trainer.is_world_process_zero():
            runs.remove_incomplete(folder)
        raise
    if leave.stopped:
        raise StopRequested(stop.status, f"stopped by a signal; step {trainer.state.global_step} is saved.")
    return figures


def save(trainer: Trainer, options: dict, folder: Path):
    """Save the model, its tokenizer or image processor, and `training_args.json` with the options of the program."""
    with new_files(folder, trainer.accelerator) as files:
        trainer.save_model(str(files))
        if trainer.is_world_process_zero():
            write_json(files / "training_args.json", trainer.args.to_dict() | options)


@contextmanager
def classifier_run(args: ClassifierArguments, training: TrainingArguments) -> Iterator[None]:
    """Set the seed and lock the output folder for the block. A signal ends the process with status and message."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.setLevel(logging.INFO if training.process_index == 0 else logging.ERROR)
    try:
        refuse(training, "push_to_hub")
        with output_folder(training):
            runs.check_run(Path(training.output_dir), args.overwrite_output_dir, training.resume_from_checkpoint)
            set_seed(training.seed)
            yield
    except StopRequested as request:
        status, message = request.args
        logger.info("%s Continue with --resume_from_checkpoint latest.", message)
        sys.exit(status)


def logits_of(outputs: np.ndarray | tuple) -> np.ndarray:
    """The logits `(N, C)`, with which the outputs of a model begin."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of rows whose class has the largest logit."""
    return {"accuracy": float((logits_of(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def train_classifier(
    trainer: GroupingTrainer, args: ClassifierArguments, tests: dict[str, Dataset], labels: dict[str, list[int]],
    task: str, compared: dict | None = None, **about,
):  # fmt: skip
    """Train, save, evaluate, and write `all_results.json`, a line for each test and the next commands.

    The results have `TEST_accuracy` and `TEST_majority`, the accuracy of always answering the largest class, and the
    fields `about`. `labels` are the classes of `train` and of the tests. A run to resume has the same `compared`.
    """
    train(trainer, labels["train"], **compared or {})
    save(trainer, vars(args), Path(trainer.args.output_dir))  # before the evaluations, which may run out of memory
    model = "transformer" if args.transformer else "-".join(trainer.model.config.tno_types)
    results = {"task": task, "model": model, "config": args.config_name, "config_overrides": args.config_overrides}
    results |= about | describe(trainer)
    written = []
    for name, rows in tests.items():
        with suggest_smaller("evaluation", "give a smaller --per_device_eval_batch_size"):
            right = trainer.evaluate(rows, metric_key_prefix=name)[f"{name}_accuracy"]
        majority = max(Counter(labels[name]).values()) / len(labels[name])
        results |= {f"{name}_accuracy": right, f"{name}_majority": majority}
        written.append(f"{task}, {model}, {name}: accuracy {right:.2%} (largest class {majority:.2%})\n")
    if trainer.is_world_process_zero():
        folder = trainer.args.output_dir
        write_json(Path(folder) / "all_results.json", results)
        sys.stdout.write(f"{''.join(written)}saved in {folder}\n{next_steps(folder, 'classifier')}\n")


def describe(trainer: Trainer) -> dict:
    """The description of a run after the training."""
    summary = next(entry for entry in reversed(trainer.state.log_history) if "train_runtime" in entry)
    return {
        "parameters": trainer.model.num_parameters(),
        "train_rows": len(trainer.train_dataset),
        "steps": trainer.state.global_step,
        "batch_size": rows_of_a_step(trainer.args),
        "seed": trainer.args.seed,
        "train_seconds": summary["train_runtime"],
        "steps_per_second": summary["train_steps_per_second"],
        "torch_threads": torch.get_num_threads(),
        "device": str(trainer.args.device),
    }
