"""Functions for programs that train classifiers: accuracy, that of the largest class, and the results."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import EvalPrediction, Trainer

from tnn_scripts.common.atomic import new_files, write_json
from tnn_scripts.common.commands import next_steps
from tnn_scripts.common.devices import suggest_smaller
from tnn_scripts.common.grouping_trainer import rows_of_a_step


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The fraction of rows whose class has the largest logit."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == prediction.label_ids).mean())}


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


def score(trainer: Trainer, splits: dict[str, Dataset], labels: dict[str, list[int]]) -> dict[str, float]:
    """The figures `SPLIT_accuracy` and `SPLIT_majority`, the accuracy of always answering the largest class.

    Raises:
        MemoryExceededError: a batch does not fit into memory.
    """
    figures = {}
    for name, rows in splits.items():
        with suggest_smaller("evaluation", "give a smaller --per_device_eval_batch_size"):
            figures[f"{name}_accuracy"] = trainer.evaluate(rows, metric_key_prefix=name)[f"{name}_accuracy"]
        figures[f"{name}_majority"] = max(Counter(labels[name]).values()) / len(labels[name])
    return figures


def save(trainer: Trainer, options: dict):
    """Save the model, its tokenizer or image processor, and `training_args.json`.

    Raises:
        SavingError: they could not be written.
    """
    with new_files(Path(trainer.args.output_dir), trainer.accelerator) as folder:
        trainer.save_model(str(folder))
        if trainer.is_world_process_zero():
            write_json(folder / "training_args.json", trainer.args.to_dict() | options)


def report(trainer: Trainer, results: dict):
    """Write `all_results.json`, a line for each split, and the next commands.

    Raises:
        SavingError: it could not be written.
    """
    if not trainer.is_world_process_zero():
        return
    write_json(Path(trainer.args.output_dir) / "all_results.json", results)
    for name in (key.removesuffix("_accuracy") for key in results if key.endswith("_accuracy")):
        sys.stdout.write(
            f"{results['task']}, {results['model']}, {name}: accuracy {results[f'{name}_accuracy']:.2%} "
            f"(largest class {results[f'{name}_majority']:.2%})\n"
        )
    sys.stdout.write(f"saved in {trainer.args.output_dir}\n{next_steps(trainer.args.output_dir, 'classifier')}\n")
