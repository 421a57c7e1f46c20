"""Measure how much a causal RTF model remembers, by its state size: Copying and Delay of the RTF paper.

The program trains one model for every state size and seed, with transformers' Trainer. Copying trains a language model
of gated Toeplitz units and measures the accuracy on the tokens to copy. Delay trains a linear model of one operator
and measures the root mean square error relative to the signal. The recipes copying.yaml and delay.yaml have the
lengths and settings of the paper; small-*.yaml run in minutes on a CPU.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/small-delay --output_dir outputs/b
"""

import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tnn_scripts.common.errors import report_errors

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from modeling_tnn import PoleCallback, TnnConfig, TnnForCausalLM
from modeling_tnn.tno_auto import build_tno
from tnn_scripts.common.arguments import chosen_seeds, parse_arguments
from tnn_scripts.common.atomic import saving_errors, write_json
from tnn_scripts.common.dry_run import dry_run
from tnn_scripts.common.optimizers import GroupArguments, GroupingTrainer
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.common.trainer import output_folder
from tnn_scripts.data.synthetic import IGNORED, Copying, Delay


@dataclass(kw_only=True)
class SyntheticArguments(GroupArguments):
    """The task and the models."""

    task: str = field(metadata={"choices": ("copying", "delay")})
    state_sizes: list[int] = field(metadata={"help": "Orders of the rational function to compare."})
    memory: int = field(default=1024, metadata={"help": "Tokens to copy, or steps of delay."})
    num_tokens: int = field(default=64, metadata={"help": "Size of the vocabulary of copying, marker included."})
    length: int = 4000
    hidden_size: int = field(default=64, metadata={"help": "Width of the model; for delay the number of channels."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the model for copying."})
    rtf_initializer: str = field(default="montel", metadata={"help": "Initial coefficients: zeros, xavier or montel."})
    rtf_constraint: str | None = field(default=None, metadata={"help": "l1_montel keeps poles in the unit circle."})
    seeds: list[int] | None = None
    max_train_samples: int = 10_000
    max_eval_samples: int = 1_000
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        longest = 2 * self.memory + 1 if self.task == "copying" else self.length
        if self.task == "delay" and self.memory >= self.length:
            raise ValueError(f"--memory must be below --length {self.length} for a delay, got {self.memory}")
        if min(self.state_sizes) < 1 or max(self.state_sizes) >= longest:
            sizes = " ".join(map(str, self.state_sizes))
            raise ValueError(f"--state_sizes must be at least 1 and below the length {longest}, got {sizes}")


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


def model_config(args: SyntheticArguments, state_size: int) -> TnnConfig:
    copying = args.task == "copying"
    return TnnConfig(
        tno_type="rtf",
        vocab_size=args.num_tokens,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers if copying else 1,
        gtu_expansion=1,
        max_position_embeddings=2 * args.memory + 1 if copying else args.length,
        rtf_state_size=state_size,
        rtf_num_denominators=1,
        rtf_initializer=args.rtf_initializer,
        rtf_constraint=args.rtf_constraint,
        hidden_dropout_prob=0.0,
    )


def copying_accuracy(predictions, labels) -> dict[str, float]:
    """The accuracy of the likeliest tokens `predictions` `(B, L)`. Each predicts the label at the next position."""
    counted = labels[:, 1:] != IGNORED
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counted].mean())}


def delay_error(predictions, labels) -> dict[str, float]:
    """The root mean square error relative to the signals."""
    return {"error": float((((predictions - labels) ** 2).mean() / (labels**2).mean()) ** 0.5)}


@dataclass(frozen=True)
class SyntheticTask:
    """The data, the model and the score of a task."""

    rows: Callable
    model: Callable
    score: Callable
    metric: str
    preprocess: Callable | None = None


def copying_rows(args: SyntheticArguments, rows: int, seed: int) -> Copying:
    return Copying(rows, seed, args.memory, args.num_tokens)


def delay_rows(args: SyntheticArguments, rows: int, seed: int) -> Delay:
    return Delay(rows, seed, args.length, args.memory)


TASKS = {
    "copying": SyntheticTask(
        copying_rows, TnnForCausalLM, copying_accuracy, "accuracy", lambda logits, labels: logits.argmax(-1)
    ),
    "delay": SyntheticTask(delay_rows, DelayModel, delay_error, "error"),
}


def train(args: SyntheticArguments, training: TrainingArguments, state_size: int, seed: int) -> dict:
    """Train one model; its score on unseen rows, and the time and the loss of the training."""
    task, training = TASKS[args.task], copy.copy(training)
    training.seed = seed
    training.output_dir = str(Path(training.output_dir) / f"state-{state_size}-seed-{seed}")
    set_seed(seed)
    trainer = GroupingTrainer(
        model=task.model(model_config(args, state_size)),
        args=training,
        train_dataset=task.rows(args, args.max_train_samples, seed),
        eval_dataset=task.rows(args, args.max_eval_samples, seed + 10**6),
        compute_metrics=lambda prediction: task.score(prediction.predictions, prediction.label_ids),
        preprocess_logits_for_metrics=task.preprocess,
        callbacks=[PoleCallback()],
        groups=args.groups(),
    )
    if args.dry_run:
        dry_run(trainer, len(args.state_sizes) * len(args.seeds))
    with saving_errors(Path(training.output_dir)):
        result = trainer.train()
    return {
        "state_size": state_size,
        "seed": seed,
        task.metric: trainer.evaluate()[f"eval_{task.metric}"],
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "steps": trainer.state.global_step,
        "train_loss": result.training_loss,
        "train_seconds": result.metrics["train_runtime"],
    }


def table(rows: list[dict], metric: str) -> str:
    """A Markdown table of the mean over the seeds and the range, for each state size."""
    lines = []
    for size in sorted({row["state_size"] for row in rows}):
        scores = [row[metric] for row in rows if row["state_size"] == size]
        figures = (f"{score:.4f}" for score in (statistics.mean(scores), min(scores), max(scores)))
        lines.append([size, *figures, len(scores)])
    return markdown_table(["state size", f"{metric}, mean", "lowest", "highest", "seeds"], lines, texts=0)


def run(args: SyntheticArguments, training: TrainingArguments):
    """Train all models, one after the other, and write the results after each.

    Raises:
        ValueError: --seed and --seeds contradict each other.
    """
    args.seeds = chosen_seeds(args.seeds, training)
    rows, metric = [], TASKS[args.task].metric
    output = Path(training.output_dir) / "all_results.json"
    for size in args.state_sizes:
        for seed in args.seeds:
            rows.append(train(args, training, size, seed))
            settings = vars(args) | {"batch_size": training.train_batch_size, "torch_threads": torch.get_num_threads()}
            write_json(output, {"settings": settings, "rows": rows})
            sys.stdout.write(f"state size {size}, seed {seed}: {metric} {rows[-1][metric]:.4f}\n")
    sys.stdout.write(f"{table(rows, metric)}\nsaved in {output}\n")


@report_errors
def main():
    args, training = parse_arguments([SyntheticArguments, TrainingArguments], __doc__)
    with output_folder(training, args.dry_run):
        run(args, training)


if __name__ == "__main__":
    main()
