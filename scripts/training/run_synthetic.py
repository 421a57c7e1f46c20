"""Measure what causal models remember and find, in rows of tokens or of signals."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, TrainingArguments

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.tno_auto import build_tno
from tnn_programs.cli.task_arguments import ComparisonArguments
from tnn_programs.data.synthetic import IGNORED, Copying, Delay, DelayedTokens, Passkey, Recall, SelectiveCopying
from tnn_programs.training.comparing import Task, compare
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.run_ablation import ByteTask

ROWS = {"copying": Copying, "selective-copying": SelectiveCopying, "delay": DelayedTokens, "recall": Recall}
ROWS |= {"passkey": Passkey}


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


class TokenTask(Task):
    """Rows of tokens: the accuracy on those to say."""

    metric, best = "accuracy", max
    reduced = staticmethod(lambda logits, labels: logits.argmax(-1))  # logits of all rows together would not fit

    def __init__(self, args: ComparisonArguments, training: TrainingArguments):
        super().__init__(args, training, [args.positions, *args.longer])

    @staticmethod
    def scores(predictions, labels) -> dict[str, float]:
        """The accuracy of the likeliest tokens, `(B, L)`. Each predicts the label at the next position."""
        counted = labels[:, 1:] != IGNORED
        return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counted].mean())}

    def data(self, count: int, seed: int, length: int) -> Dataset:
        """Rows of a length."""
        return ROWS[self.args.name](count, seed, self.args.memory, length, self.args.num_tokens)

    def options(self, config: PreTrainedConfig, seed: int) -> dict:
        return {
            "train_dataset": self.data(self.args.max_train_samples, seed, self.lengths[0]),
            "compute_metrics": lambda found: self.scores(found.predictions, found.label_ids),
            "preprocess_logits_for_metrics": self.reduced,
        }

    def score(self, trainer: GroupingTrainer, length: int) -> float:
        rows = self.data(self.args.max_eval_samples, trainer.args.seed + 10**6, length)
        return trainer.evaluate(rows)[f"eval_{self.metric}"]


class SignalTask(TokenTask):
    """Signals to delay by one operator: the error."""

    metric, best, reduced = "error", min, None

    @staticmethod
    def scores(predictions, labels) -> dict[str, float]:
        """The root mean square error relative to the signals."""
        return {"error": float((((predictions - labels) ** 2).mean() / (labels**2).mean()) ** 0.5)}

    def data(self, count: int, seed: int, length: int) -> Dataset:
        return Delay(count, seed, length, self.args.memory)

    def model(self, config: TnnConfig) -> nn.Module:
        return DelayModel(config)


def begin(args: ComparisonArguments, training: TrainingArguments) -> Task:
    """The task that the arguments name."""
    return (SignalTask if args.of_signals else ByteTask if args.name == "text" else TokenTask)(args, training)


def run(args: ComparisonArguments, training: TrainingArguments):
    """Train and score all models for all tasks."""
    compare(args, training, begin)
