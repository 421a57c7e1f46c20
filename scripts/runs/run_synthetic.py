"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey.

The program trains one model for every variant and seed, with transformers' Trainer. Copying and Delay are tasks of
the RTF paper and compare state sizes, of RTF or, with --config_overrides tno_type=s4d, of S4D. Copying trains a
language model, of gated Toeplitz units unless --config_overrides says otherwise, and measures the accuracy on the
tokens to copy. Delay trains a linear model of one operator and measures the root mean square error relative to the
signal. Recall (multi-query associative recall) and Passkey compare any configurations, such as hybrids with attention,
by the accuracy on the tokens to find. The recipes copying.yaml and delay.yaml have the lengths and settings of the
paper; small-*.yaml run in minutes on a CPU.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/small-recall --output_dir outputs/b
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
from tnn_scripts.common.arguments import chosen_seeds, parse_arguments, parse_overrides, training_options
from tnn_scripts.common.atomic import saving_errors, write_json
from tnn_scripts.common.belonging import rows_of_a_step
from tnn_scripts.common.declared import changed
from tnn_scripts.common.dry_run import dry_run
from tnn_scripts.common.optimizers import GroupArguments, GroupingTrainer
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.common.trainer import output_folder, refuse_resume
from tnn_scripts.data.synthetic import IGNORED, Copying, Delay, Passkey, Recall


@dataclass(kw_only=True)
class SyntheticArguments(GroupArguments):
    """The task and the models."""

    task: str = field(metadata={"choices": ("copying", "delay", "recall", "passkey")})
    state_sizes: list[int] = field(
        default_factory=list, metadata={"help": "Numbers of states to compare, of rtf or s4d: copying and delay."}
    )
    variants: list[str] = field(default_factory=list)
    config_overrides: str | None = None
    memory: int = field(
        default=1024, metadata={"help": "Tokens to copy, steps of delay, pairs to recall, or tokens of a passkey."}
    )
    num_tokens: int = field(default=64, metadata={"help": "Size of the vocabulary, markers included."})
    length: int = 4000
    longer: list[int] = field(default_factory=list)
    hidden_size: int = field(default=64, metadata={"help": "Width of the model; for delay the number of channels."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the model; delay has one."})
    rtf_initializer: str = field(default="montel", metadata={"help": "Initial coefficients: zeros, xavier or montel."})
    rtf_constraint: str | None = field(default=None, metadata={"help": "l1_montel keeps poles in the unit circle."})
    seeds: list[int] | None = None
    max_train_samples: int = 10_000
    max_eval_samples: int = 1_000
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        task = TASKS[self.task]
        task.check(self)
        for name, needed in (("state_sizes", task.by_state), ("variants", not task.by_state)):
            if bool(getattr(self, name)) != needed:
                given = " ".join(map(str, getattr(self, name))) or "nothing"
                raise ValueError(f"--{name} must be {'given' if needed else 'left out'} for {self.task}, got {given}")
        if task.by_state and self.longer:
            raise ValueError(f"--longer must be left out for {self.task}, got {' '.join(map(str, self.longer))}")
        self.models()

    def models(self) -> dict[int | str, TnnConfig]:
        """The configurations to compare, by state size or by name of the variant.

        Raises:
            ValueError: a field of a variant is unknown, or has a value outside its limits.
        """
        if self.state_sizes:
            return {size: state_config(self, size) for size in self.state_sizes}
        names = [variant.partition(":")[0] for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"--variants must have different names, got {', '.join(names)}")
        return dict(zip(names, (variant_config(self, variant) for variant in self.variants), strict=True))


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


def state_config(args: SyntheticArguments, state_size: int) -> TnnConfig:
    copying = args.task == "copying"
    fields = {
        "tno_type": "rtf",
        "vocab_size": args.num_tokens,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers if copying else 1,
        "gtu_expansion": 1,
        "max_position_embeddings": 2 * args.memory + 1 if copying else args.length,
        "rtf_state_size": state_size,
        "s4d_state_size": state_size,
        "rtf_num_denominators": 1,
        "rtf_initializer": args.rtf_initializer,
        "rtf_constraint": args.rtf_constraint,
        "hidden_dropout_prob": 0.0,
    }
    return TnnConfig(**fields | parse_overrides(args.config_overrides))


def variant_config(args: SyntheticArguments, variant: str) -> TnnConfig:
    """The configuration of a variant `name:field=value,field=value`.

    Raises:
        ValueError: a field is unknown, or has a value outside its limits.
    """
    name, _, changes = variant.partition(":")
    if "=" in name:
        raise ValueError(f"--variants must be NAME or NAME:FIELD=VALUE,..., got {variant}")
    fields = {
        "vocab_size": args.num_tokens,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "gtu_expansion": 1,
        "max_position_embeddings": args.length,
        "hidden_dropout_prob": 0.0,
    }
    try:
        return TnnConfig(**fields | parse_overrides(args.config_overrides) | parse_overrides(changes))
    except ValueError as error:
        raise ValueError(f"--variants {name}: {error}") from error


def token_accuracy(predictions, labels) -> dict[str, float]:
    """The accuracy of the likeliest tokens `predictions` `(B, L)`. Each predicts the label at the next position."""
    counted = labels[:, 1:] != IGNORED
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counted].mean())}


def delay_error(predictions, labels) -> dict[str, float]:
    """The root mean square error relative to the signals."""
    return {"error": float((((predictions - labels) ** 2).mean() / (labels**2).mean()) ** 0.5)}


def check_state(args: SyntheticArguments):
    longest = 2 * args.memory + 1 if args.task == "copying" else args.length
    if args.task == "delay" and args.memory >= args.length:
        raise ValueError(f"--memory must be below --length {args.length} for a delay, got {args.memory}")
    if args.state_sizes and (min(args.state_sizes) < 1 or max(args.state_sizes) >= longest):
        sizes = " ".join(map(str, args.state_sizes))
        raise ValueError(f"--state_sizes must be at least 1 and below the length {longest}, got {sizes}")


def check_recall(args: SyntheticArguments):
    if not 1 <= args.memory <= (args.num_tokens - 1) // 2:
        raise ValueError(f"--num_tokens must be at least 2 --memory + 1 for recall, got {args.num_tokens}")
    check_lengths(args, 3 * args.memory + 1)


def check_passkey(args: SyntheticArguments):
    if args.num_tokens < 3 or args.memory < 1:
        raise ValueError(f"--num_tokens must be at least 3, got {args.num_tokens}, and --memory 1, got {args.memory}")
    check_lengths(args, 2 * args.memory + 2)


def check_lengths(args: SyntheticArguments, least: int):
    lengths = [args.length, *args.longer]
    if min(lengths) < least:
        given = " ".join(map(str, lengths))
        raise ValueError(f"--length and --longer must be at least {least} for {args.task}, got {given}")


@dataclass(frozen=True)
class SyntheticTask:
    """The data, the model and the score of a task.

    Attributes:
        rows: rows of a length, from arguments, number, seed and length.
        by_state: whether state sizes are compared, and not variants.
        check: raises a ValueError for arguments that contradict each other.
    """

    rows: Callable
    model: Callable
    score: Callable
    metric: str
    by_state: bool
    check: Callable
    preprocess: Callable | None = None


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens `(B, L)`; logits of all rows together would not fit."""
    return logits.argmax(-1)


FINDING = {"model": TnnForCausalLM, "score": token_accuracy, "metric": "accuracy", "preprocess": likeliest}
TASKS = {
    "copying": SyntheticTask(
        lambda args, rows, seed, length: Copying(rows, seed, args.memory, args.num_tokens),
        by_state=True, check=check_state, **FINDING,
    ),
    "delay": SyntheticTask(
        lambda args, rows, seed, length: Delay(rows, seed, length, args.memory),
        DelayModel, delay_error, "error", by_state=True, check=check_state,
    ),
    "recall": SyntheticTask(
        lambda args, rows, seed, length: Recall(rows, seed, args.memory, length, args.num_tokens),
        by_state=False, check=check_recall, **FINDING,
    ),
    "passkey": SyntheticTask(
        lambda args, rows, seed, length: Passkey(rows, seed, args.memory, length, args.num_tokens),
        by_state=False, check=check_passkey, **FINDING,
    ),
}  # fmt: skip


def train(args: SyntheticArguments, training: TrainingArguments, name: int | str, seed: int) -> dict:
    """Train one model; its score on unseen rows of each length, and the time and the loss of the training."""
    task, training = TASKS[args.task], copy.copy(training)
    training.seed = seed
    training.output_dir = str(Path(training.output_dir) / f"{'state-' * task.by_state}{name}-seed-{seed}")
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
        "state_size" if task.by_state else "variant": name,
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


@report_errors
def main():
    args, options = parse_arguments([SyntheticArguments, training_options()], __doc__)
    training = TrainingArguments(**changed(options))
    refuse_resume(training)
    with output_folder(training, args.dry_run):
        run(args, training)


if __name__ == "__main__":
    main()
