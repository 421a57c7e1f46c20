"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey."""

import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from modeling_tnn import PoleCallback, TnnConfig, TnnForCausalLM
from modeling_tnn.tno_auto import build_tno
from tnn_scripts.common.arguments import chosen_seeds
from tnn_scripts.common.atomic import saving_errors, write_json
from tnn_scripts.common.costs import dry_run
from tnn_scripts.common.grouping_trainer import GroupingTrainer, rows_of_a_step
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.common.trainer import output_folder, refuse_resume
from tnn_scripts.data.synthetic import IGNORED, Copying, Delay, Passkey, Recall
from tnn_scripts.options.synthetic import SyntheticArguments


class DelayModel(nn.Module):
    """A linear model: a linear map, an operator, and a linear map."""

    def __init__(self, config: TnnConfig):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(1, config.gtu_dim), nn.Linear(config.gtu_dim, 1)
        self.tno = build_tno(config)
        with torch.no_grad():
            self.tno.reset_parameters()

    def forward(self, signal: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the outputs `logits` `(B, L)` for `signal` and `labels`, `(B, L)` each."""
        answer = self.decoder(self.tno(self.encoder(signal[..., None])))[..., 0]
        return {"loss": nn.functional.mse_loss(answer, labels), "logits": answer}


def token_accuracy(predictions, labels) -> dict[str, float]:
    """The accuracy of the likeliest tokens `predictions` `(B, L)`. Each predicts the label at the next position."""
    counted = labels[:, 1:] != IGNORED
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counted].mean())}


def delay_error(predictions, labels) -> dict[str, float]:
    """The root mean square error relative to the signals."""
    return {"error": float((((predictions - labels) ** 2).mean() / (labels**2).mean()) ** 0.5)}


@dataclass(frozen=True)
class SyntheticTask:
    """The data, the model and the score of a task.

    Attributes:
        rows: rows of a length, from arguments, number, seed and length.
    """

    rows: Callable
    model: Callable
    score: Callable
    metric: str
    preprocess: Callable | None = None


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens `(B, L)`; logits of all rows together would not fit."""
    return logits.argmax(-1)


FINDING = {"model": TnnForCausalLM, "score": token_accuracy, "metric": "accuracy", "preprocess": likeliest}
TASKS = {
    "copying": SyntheticTask(
        lambda args, rows, seed, length: Copying(rows, seed, args.memory, args.num_tokens), **FINDING,
    ),
    "delay": SyntheticTask(
        lambda args, rows, seed, length: Delay(rows, seed, length, args.memory),
        DelayModel, delay_error, "error",
    ),
    "recall": SyntheticTask(
        lambda args, rows, seed, length: Recall(rows, seed, args.memory, length, args.num_tokens), **FINDING,
    ),
    "passkey": SyntheticTask(
        lambda args, rows, seed, length: Passkey(rows, seed, args.memory, length, args.num_tokens), **FINDING,
    ),
}  # fmt: skip


def train(args: SyntheticArguments, training: TrainingArguments, name: int | str, seed: int) -> dict:
    """Train one model; its score on unseen rows of each length, and the time and the loss of the training."""
    task, training = TASKS[args.task], copy.copy(training)
    training.seed = seed
    training.output_dir = str(Path(training.output_dir) / f"{'state-' * args.by_state}{name}-seed-{seed}")
    set_seed(seed)
    trainer = GroupingTrainer(
        model=task.model(args.models()[name]),
        args=training,
        train_dataset=task.rows(args, args.max_train_samples, seed, args.length),
        compute_metrics=lambda prediction: task.score(prediction.predictions, prediction.label_ids),
        preprocess_logits_for_metrics=task.preprocess,
        callbacks=[PoleCallback()],
        groups=args.groups(),
        eval_dataset=task.rows(args, args.max_eval_samples, seed + 10**6, args.length),
    )
    if args.dry_run:
        dry_run(trainer, len(args.models()) * len(args.seeds))
    with saving_errors(Path(training.output_dir)):
        result = trainer.train()
    scores = {}
    for length in (args.length, *args.longer):
        rows = task.rows(args, args.max_eval_samples, seed + 10**6, length)
        scores[str(length)] = trainer.evaluate(rows)[f"eval_{task.metric}"]
    longer = {"by_length": scores} if args.longer else {}
    return {
        "state_size" if args.by_state else "variant": name,
        "seed": seed,
        task.metric: scores[str(args.length)],
        **longer,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "steps": trainer.state.global_step,
        "train_loss": result.training_loss,
        "train_seconds": result.metrics["train_runtime"],
    }


def table(rows: list[dict], metric: str) -> str:
    """A Markdown table of the mean over the seeds and the range, for each model, and of the mean at longer lengths."""
    compared = next(iter(rows[0]))
    lines, longer = [], list(rows[0].get("by_length", {}))[1:]
    for name in dict.fromkeys(row[compared] for row in rows):
        own = [row for row in rows if row[compared] == name]
        scores = [row[metric] for row in own]
        figures = [statistics.mean(scores), min(scores), max(scores)]
        figures += [statistics.mean(row["by_length"][length] for row in own) for length in longer]
        lines.append([name, *(f"{figure:.4f}" for figure in figures), len(scores)])
    headers = [compared.replace("_", " "), f"{metric}, mean", "lowest", "highest", *(f"at {n}" for n in longer)]
    return markdown_table([*headers, "seeds"], lines, texts=0 if compared == "state_size" else 1)


def run(args: SyntheticArguments, training: TrainingArguments):
    """Train all models, one after the other, and write the results after each.

    Raises:
        ValueError: --seed and --seeds contradict each other.
    """
    args.seeds = chosen_seeds(args.seeds, training)
    rows, metric = [], TASKS[args.task].metric
    output = Path(training.output_dir) / "all_results.json"
    settings = vars(args) | {"batch_size": rows_of_a_step(training), "torch_threads": torch.get_num_threads()}
    for name in args.models():
        for seed in args.seeds:
            rows.append(train(args, training, name, seed))
            if training.process_index == 0:
                write_json(output, {"settings": settings, "rows": rows})
                compared = "state size " if args.state_sizes else ""
                sys.stdout.write(f"{compared}{name}, seed {seed}: {metric} {rows[-1][metric]:.4f}\n")
    if training.process_index == 0:
        sys.stdout.write(f"{table(rows, metric)}\nsaved in {output}\n")


def start(args: SyntheticArguments, options: dict):
    """Run with the options of the program, and those of `TrainingArguments`."""
    training = TrainingArguments(**options)
    refuse_resume(training)
    with output_folder(training, args.dry_run):
        run(args, training)
