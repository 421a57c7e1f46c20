"""Comparisons: each variant trained for each task, at each learning rate and with each seed, and their tables.

A run that `all_results.json` has is not repeated, so a comparison that was stopped goes on by the same command.
"""

import copy
import hashlib
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, TrainingArguments, set_seed

from modeling_tnn.tno_rtf import RtfOperator
from modeling_tnn.tools.comparing import match_parameters
from modeling_tnn.tools.poles import PoleCallback, spectral_radius
from tnn_programs.benchmarks import measure, models
from tnn_programs.cli.atomic import read_json, saving_errors, write_json, write_text
from tnn_programs.cli.tables import markdown_table
from tnn_programs.cli.task_arguments import ComparisonArguments
from tnn_programs.training.grouping_trainer import GroupingTrainer, rows_of_a_step
from tnn_programs.training.peers import start_decays
from tnn_programs.training.trainer import output_folder, refuse

logger = logging.getLogger("comparison")
# Options that say nothing of a single run, or are told of it apart.
OF_ALL = {
    "variants", "task", "seeds", "seeds_at_best", "sweep_learning_rates", "contexts", "state_sizes", "seed",
    "learning_rate", "output_dir", "logging_dir", "run_name",
}  # fmt: skip


class Task:
    """What all variants are trained for, by `args` and Trainer's `training`.

    A subclass has `options(config, seed)`, the data and further options of Trainer for a run, `score(trainer, length)`
    on rows of a length, the name of the score (`metric`), and what chooses among scores (`best`). `lengths` are those
    of the rows that are scored, the trained one first.
    """

    metric, best = "", min

    def __init__(self, args: ComparisonArguments, training: TrainingArguments, lengths: list[int]):
        self.args, self.training, self.lengths = args, training, lengths
        self.name, self.rates = args.name, args.sweep_learning_rates or [training.learning_rate]

    def model(self, config: PreTrainedConfig) -> nn.Module:
        """A new model."""
        return AutoModelForCausalLM.from_config(config)

    def config(self, variant: str) -> PreTrainedConfig:
        """The configuration of a variant, with the parameters of the first one if they are to be equal."""
        config, first = (self.args.variant_config(one) for one in (variant, self.args.compared[0]))
        if not self.args.equal_parameters or variant == self.args.compared[0]:
            return config
        try:
            return match_parameters(config, first, self.model)
        except ValueError as error:
            raise ValueError(f"--variants {variant} with --equal_parameters: {error}") from error

    def trainer(self, training: TrainingArguments, variant: str, rate: float) -> GroupingTrainer:
        """The Trainer of one variant, with its model."""
        name, config = variant.partition(":")[0], self.config(variant)
        place = f"{name}-lr{rate:g}" if self.args.sweep_learning_rates else name
        training.output_dir = str(Path(training.output_dir) / f"{place}-seed-{training.seed}")
        training.learning_rate = rate
        return GroupingTrainer(
            model=start_decays(self.model(config)),
            args=training,
            callbacks=[PoleCallback(self.args.max_pole_radius)],
            groups=self.args.groups(),
            **self.options(config, training.seed),
        )

    def row(self, trainer: GroupingTrainer, result, variant: str, rate: float) -> dict:
        """The score of a trained variant at each length, the time of its training and the loss by step, in nats."""
        model, log = trainer.model.eval(), trainer.state.log_history
        return {
            "task": self.name,
            "variant": variant.partition(":")[0],
            "changes": variant.partition(":")[2],
            "learning_rate": rate,
            "seed": trainer.args.seed,
            self.metric: {str(length): self.score(trainer, length) for length in self.lengths},
            "largest_pole": largest_pole(model),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": trainer.state.global_step,
            "train_loss": result.training_loss,
            "train_seconds": result.metrics["train_runtime"],
            "training_loss": {str(entry["step"]): entry["loss"] for entry in log if "loss" in entry},
        }

    def best_rate(self, rows: list[dict]) -> float:
        """The rate that is best at the trained length, in the mean over the seeds that all rates have."""
        rates = {rate: {row["seed"]: row for row in rows if row["learning_rate"] == rate} for rate in self.rates}
        seeds, length = set.intersection(*map(set, rates.values())), str(self.lengths[0])
        scores = {rate: [own[seed][self.metric][length] for seed in seeds] for rate, own in rates.items()}
        return self.best(scores, key=lambda rate: statistics.mean(scores[rate]))

    def rows(self, runs: "Runs", variant: str) -> list[dict]:
        """The rows of a variant: at each rate with each seed, or with all but the first at the best rate alone."""
        (first, *others), rates = self.args.seeds, self.rates
        rows = [runs.train(self, (variant, rate), first) for rate in rates]
        rates = [self.best_rate(rows)] if self.args.seeds_at_best else rates
        return rows + [runs.train(self, (variant, rate), seed) for rate in rates for seed in others]

    def table(self, rows: list[dict]) -> str:
        """A Markdown table of each variant at its best rate: the scores of all seeds."""
        lines = []
        for name in dict.fromkeys(row["variant"] for row in rows):
            own = [row for row in rows if row["variant"] == name]
            rate = self.best_rate(own)
            own = [row for row in own if row["learning_rate"] == rate]
            scores = (" / ".join(f"{row[self.metric][str(length)]:.4g}" for row in own) for length in self.lengths)
            lines.append([name, *scores, f"{rate:g}", f"{own[0]['parameters']:,}", len(own)])
        scores = (f"{self.metric} at {length}" for length in self.lengths)
        return markdown_table(["variant", *scores, "learning rate", "parameters", "seeds"], lines)


@torch.no_grad()
def largest_pole(model: nn.Module) -> float | None:
    """The largest magnitude of a pole in all RTF layers, or None without such layers. Below 1 generation is stable."""
    found = [spectral_radius(module.denominators()) for module in model.modules() if isinstance(module, RtfOperator)]
    return torch.cat(found).max().item() if found else None


class Runs:
    """The runs of a comparison, and the file with their rows."""

    def __init__(self, args: ComparisonArguments, training: TrainingArguments):
        self.writes = training.process_index == 0
        self.output = Path(training.output_dir) / "all_results.json"
        settings = {"batch_size": rows_of_a_step(training), "torch_threads": torch.get_num_threads()}
        self.results, self.rows = {"settings": vars(args) | settings}, {}
        found = read_json(self.output)["rows"] if self.output.exists() else []
        self.known = {row["run"]: row for row in found if "run" in row}

    def train(self, task: Task, chosen: tuple, seed: int) -> dict:
        """The row of what is chosen, which is trained unless its row is known."""
        args, training = task.args, copy.copy(task.training)
        given = training.to_dict() | vars(args)
        told = {name: value for name, value in given.items() if name not in OF_ALL and value}
        told = [task.name, told, chosen, seed, args.compared[:1] if args.equal_parameters else None]
        run = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
        if run not in self.known:
            training.seed = seed
            set_seed(seed)
            trainer = task.trainer(training, *chosen)
            with saving_errors(Path(trainer.args.output_dir)):
                result = trainer.train()
            self.known[run] = task.row(trainer, result, *chosen) | {"run": run}
            logger.info("%s", {name: value for name, value in self.known[run].items() if name != "training_loss"})
        self.rows[run] = self.known[run]
        self.write()
        return self.rows[run]

    def write(self, **more):
        """Write the rows so far, then others that the file had, and `more`."""
        self.results |= more
        if self.writes:
            write_json(self.output, self.results | {"rows": list((self.rows | self.known).values())})


@contextmanager
def comparison(args: ComparisonArguments, training: TrainingArguments) -> Iterator[None]:
    """Lock the output folder for the block, which trains several models; `args` gets its seeds."""
    logging.basicConfig(level=logging.INFO if training.process_index == 0 else logging.ERROR, format="%(message)s")
    refuse(training, "push_to_hub", "resume_from_checkpoint")
    args.seeds = args.seeds or [training.seed]
    with output_folder(training):
        yield


def compare(args: ComparisonArguments, training: TrainingArguments, begin: Callable[..., Task]):
    """Train all variants for each task, which `begin` makes of its arguments and Trainer's; and write their tables."""
    tables, tasks = [], []
    with comparison(args, training):
        for own, options in args.tasks():
            trained = copy.copy(training)
            vars(trained).update(options)
            tasks.append(task := begin(own, trained))
            for variant in own.compared:
                task.config(variant)  # none is refused after hours
        runs = Runs(args, training)
        for task in tasks:
            rows = [row for variant in task.args.compared for row in task.rows(runs, variant)]
            tables.append(f"{task.name}\n\n" * (len(tasks) > 1) + task.table(rows))
        if args.contexts:
            rows = costs(max(tasks, key=lambda task: task.lengths[0]))
            runs.write(costs=rows)
            tables.append(measure.markdown(rows, models.OF_SMALL))
        if runs.writes:
            write_text(runs.output.with_suffix(".md"), "\n\n".join(tables) + "\n")
            sys.stdout.write("\n\n".join(tables) + f"\nsaved in {runs.output}\n")


def costs(task: Task) -> list[dict]:
    """The costs of all variants, with random weights: of a training step, and of a new token after each context."""
    training, length = task.training, task.lengths[0]
    sizes = {"block_size": length, "tokens": length * training.per_device_train_batch_size, "batch_size": 1}
    settings = SimpleNamespace(
        **sizes, contexts=task.args.contexts, bf16=training.bf16, repeats=3,
        device=training.device.type, threads=torch.get_num_threads(),
    )  # fmt: skip
    built = {one.partition(":")[0]: task.model(task.config(one)) for one in task.args.compared}
    return models.costs({name: model.to(training.device) for name, model in built.items()}, settings)
