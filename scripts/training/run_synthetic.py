"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey."""

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.modeling_tnn import TnnForCausalLM
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tools.poles import PoleCallback
from tnn_programs.cli.tables import markdown_table
from tnn_programs.data.synthetic import IGNORED, Copying, Delay, Passkey, Recall
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.trainer import compare, comparison

if TYPE_CHECKING:
    from tnn_programs.cli.task_arguments import ComparisonArguments


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


def rows_of(args: "ComparisonArguments", count: int, seed: int, length: int) -> Dataset:
    """Rows of the task, of a length; those of Copying have that of the memory."""
    if args.task == "copying":
        return Copying(count, seed, args.memory, args.num_tokens)
    if args.task == "delay":
        return Delay(count, seed, length, args.memory)
    return {"recall": Recall, "passkey": Passkey}[args.task](count, seed, args.memory, length, args.num_tokens)


def token_accuracy(predictions, labels) -> dict[str, float]:
    """The accuracy of the likeliest tokens `predictions` `(B, L)`. Each predicts the label at the next position."""
    counted = labels[:, 1:] != IGNORED
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counted].mean())}


def delay_error(predictions, labels) -> dict[str, float]:
    """The root mean square error relative to the signals."""
    return {"error": float((((predictions - labels) ** 2).mean() / (labels**2).mean()) ** 0.5)}


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens `(B, L)`; logits of all rows together would not fit."""
    return logits.argmax(-1)


def build_trainer(args: "ComparisonArguments", training: TrainingArguments, name: int | str) -> GroupingTrainer:
    """The Trainer of one model."""
    delays = args.task == "delay"
    training.output_dir = str(Path(training.output_dir) / f"{'state-' * args.by_state}{name}-seed-{training.seed}")
    metric = delay_error if delays else token_accuracy
    return GroupingTrainer(
        model=(DelayModel if delays else TnnForCausalLM)(args.models()[name]),
        args=training,
        train_dataset=rows_of(args, args.max_train_samples, training.seed, args.length),
        eval_dataset=rows_of(args, args.max_eval_samples, training.seed + 10**6, args.length),
        compute_metrics=lambda prediction: metric(prediction.predictions, prediction.label_ids),
        preprocess_logits_for_metrics=None if delays else likeliest,
        callbacks=[PoleCallback()],
        groups=args.groups(),
    )


def score(args: "ComparisonArguments", trainer: GroupingTrainer, result, name: int | str) -> dict:
    """The score of a trained model on unseen rows of each length."""
    metric, seed, scores = "error" if args.task == "delay" else "accuracy", trainer.args.seed, {}
    for length in (args.length, *args.longer):
        rows = rows_of(args, args.max_eval_samples, seed + 10**6, length)
        scores[str(length)] = trainer.evaluate(rows)[f"eval_{metric}"]
    return {
        "state_size" if args.by_state else "variant": name,
        "seed": seed,
        metric: scores[str(args.length)],
        **({"by_length": scores} if args.longer else {}),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "steps": trainer.state.global_step,
        "train_loss": result.training_loss,
        "train_seconds": result.metrics["train_runtime"],
    }


def table(rows: list[dict]) -> str:
    """A Markdown table of the mean over the seeds and the range, for each model, and of the mean at longer lengths."""
    compared, _, metric, *_ = rows[0]
    lines, longer = [], list(rows[0].get("by_length", {}))[1:]
    for name in dict.fromkeys(row[compared] for row in rows):
        own = [row for row in rows if row[compared] == name]
        scores = [row[metric] for row in own]
        figures = [statistics.mean(scores), min(scores), max(scores)]
        figures += [statistics.mean(row["by_length"][length] for row in own) for length in longer]
        lines.append([name, *(f"{figure:.4f}" for figure in figures), len(scores)])
    headers = [compared.replace("_", " "), f"{metric}, mean", "lowest", "highest", *(f"at {n}" for n in longer)]
    return markdown_table([*headers, "seeds"], lines, texts=0 if compared == "state_size" else 1)


def run(args: "ComparisonArguments", training: TrainingArguments):
    """Train and score all models."""
    with comparison(args, training):
        compare(args, training, partial(build_trainer, args), partial(score, args), table, list(args.models()))
