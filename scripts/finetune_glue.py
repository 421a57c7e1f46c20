"""Fine-tune a model on GLUE tasks, or on files of the same shape, with the Trainer; options as in run_glue.py.

--sweep trains with each learning rate and seed, and keeps the model with the best validation score of each task.

Example:
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name sst2 --do_train --do_eval \\
        --learning_rate 1e-4 --num_train_epochs 3 --output_dir outputs/sst2
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name all --sweep \\
        --output_dir outputs/glue
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --train_file train.csv \\
        --validation_file validation.csv --do_train --do_eval --output_dir outputs/mine
"""

import dataclasses
import itertools
import logging
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from checkpoints import write_json
from glue_data import TASKS, TaskData, load_files, load_task, tokenize_task
from glue_metrics import load_metric, main_metric
from recipes import parse_arguments
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes

logger = logging.getLogger("finetune_glue")


@dataclass
class GlueArguments:
    """The model, the data, and what of it is used."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of a model with its tokenizer."})
    task_name: list[str] | None = field(default=None, metadata={"help": f"all, or some of: {', '.join(TASKS)}."})
    dataset_path: str | None = field(default=None, metadata={"help": "Local folder of GLUE instead of the Hub."})
    train_file: str | None = field(default=None, metadata={"help": "CSV, JSON or parquet file instead of a task."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "The same, to predict; labels are not needed."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad to max_seq_length, not to the batch."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first so many."})
    from_scratch: bool = field(default=False, metadata={"help": "Random weights instead of the trained ones."})
    sweep: bool = field(default=False, metadata={"help": "Train with each learning rate and seed, keep the best."})
    sweep_learning_rates: list[float] = field(
        default_factory=lambda: [1e-5, 3e-5, 6e-5, 1e-4], metadata={"help": "Those of the TNN paper."}
    )
    sweep_seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of the sweep."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})

    def __post_init__(self):
        files = (self.train_file is not None) + (self.validation_file is not None)
        if (self.task_name is None) == (files == 0) or files == 1:
            raise ValueError("give either --task_name, or both --train_file and --validation_file")
        if self.task_name == ["all"]:
            self.task_name = list(TASKS)
        for task in self.task_name or []:
            if task not in TASKS:
                raise ValueError(f"task_name={task!r} is not possible: it must be all or one of {', '.join(TASKS)}.")


class Task:
    """A task, its metric and its data as tensors: what all runs of a sweep share."""

    def __init__(self, data: TaskData, args: GlueArguments):
        self.data, self.args = data, args
        self.name = data.name or "files"
        regression = data.label_names is None
        self.num_labels = 1 if regression else len(data.label_names)
        self.metric = load_metric(data.name, regression)
        self.main_metric = main_metric(data.name, regression)
        self.tokenizer = AutoTokenizer.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
        for names, limit in (
            (["train"], args.max_train_samples),
            (data.validation_splits, args.max_eval_samples),
            (data.test_splits, args.max_predict_samples),
        ):
            for name in names if limit is not None else []:
                data.splits[name] = data.splits[name].select(range(min(limit, len(data.splits[name]))))
        self.splits = tokenize_task(data, self.tokenizer, args.max_seq_length, args.pad_to_max_length)

    def build_model(self) -> PreTrainedModel:
        """With the weights of the pretrained model, or random ones, below a new head."""
        source, code = self.args.model_name_or_path, {"trust_remote_code": self.args.trust_remote_code}
        config = AutoConfig.from_pretrained(source, num_labels=self.num_labels, **code)
        config.problem_type = "regression" if self.data.label_names is None else "single_label_classification"
        config.pad_token_id = self.tokenizer.pad_token_id
        if self.data.label_names is not None:
            config.id2label = dict(enumerate(self.data.label_names))
            config.label2id = {name: index for index, name in config.id2label.items()}
        if self.args.from_scratch:
            return AutoModelForSequenceClassification.from_config(config, **code)
        return AutoModelForSequenceClassification.from_pretrained(source, config=config, **code)

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        """Classes or values of logits `(N, C)`, `(N,)`."""
        return logits[:, 0] if self.data.label_names is None else logits.argmax(axis=1)

    def compute_metrics(self, evaluated) -> dict[str, float]:
        return self.metric(self.predictions(evaluated.predictions), evaluated.label_ids)

    def majority(self) -> float | None:
        """The main metric of always answering the most frequent class of the training data."""
        if self.data.label_names is None:
            return None
        references = np.array(self.splits[self.data.validation_splits[0]]["label"])
        answer = statistics.mode(self.splits["train"]["label"])
        return self.metric(np.full_like(references, answer), references)[self.main_metric]


def run(task: Task, training: TrainingArguments) -> tuple[Trainer, dict]:
    """Train, evaluate and predict as told; the Trainer and all figures."""
    set_seed(training.seed)
    trainer = Trainer(
        model=task.build_model(),
        args=training,
        train_dataset=task.splits["train"] if training.do_train else None,
        eval_dataset=task.splits[task.data.validation_splits[0]],
        processing_class=task.tokenizer,
        compute_metrics=task.compute_metrics,
    )
    results = {}
    if training.do_train:
        results |= trainer.train(resume_from_checkpoint=training.resume_from_checkpoint).metrics
    if training.do_eval:
        for split in task.data.validation_splits:
            rows = task.splits[split]
            suffix = "_mm" if split.endswith("_mismatched") else ""
            figures = trainer.evaluate(rows)
            results |= {name + suffix: value for name, value in figures.items()} | {"eval_samples" + suffix: len(rows)}
    if training.do_predict:
        for split in task.data.test_splits:
            write_predictions(trainer, task, split)
    return trainer, results


def write_predictions(trainer: Trainer, task: Task, split: str):
    """`predict_results_TASK.txt`, in the form of run_glue.py."""
    rows = task.splits[split]
    columns = [name for name in rows.column_names if name != "label"]
    predictions = task.predictions(trainer.predict(rows.select_columns(columns)).predictions)
    names = task.data.label_names
    shown = [f"{value:.3f}" if names is None else names[value] for value in predictions]
    lines = [f"{index}\t{value}" for index, value in enumerate(shown)]
    file = Path(trainer.args.output_dir) / f"predict_results_{task.name}{split.removeprefix('test')}.txt"
    file.write_text("\n".join(["index\tprediction", *lines]) + "\n", encoding="utf-8")


def save(trainer: Trainer, folder: Path, results: dict):
    """The model and `all_results.json`."""
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        write_json(folder / "all_results.json", results)


def single(task: Task, training: TrainingArguments, folder: Path) -> list[dict]:
    """One run, with the learning rate and the seed of the command line."""
    trainer, results = run(task, dataclasses.replace(training, output_dir=str(folder)))
    save(trainer, folder, results)
    return [{"learning_rate": training.learning_rate, "seed": training.seed} | results]


def sweep(task: Task, training: TrainingArguments, folder: Path) -> list[dict]:
    """A run for each learning rate and seed; the best model stays in `folder`."""
    best, runs = None, []
    lower_is_better = task.main_metric == "mse"
    for rate, seed in itertools.product(task.args.sweep_learning_rates, task.args.sweep_seeds):
        place = folder / f"lr{rate:g}-seed{seed}"
        options = {"learning_rate": rate, "seed": seed, "output_dir": str(place), "save_strategy": "no"}
        trainer, results = run(task, dataclasses.replace(training, **options, do_train=True, do_eval=True))
        runs.append({"learning_rate": rate, "seed": seed} | results)
        write_json(place / "all_results.json", runs[-1])
        score = results[f"eval_{task.main_metric}"] * (-1 if lower_is_better else 1)
        if best is None or score > best:
            best = score
            save(trainer, folder, runs[-1])
    return runs


def summarize(task: Task, runs: list[dict]) -> dict:
    """The best learning rate by its mean over the seeds, and the best run."""
    key = f"eval_{task.main_metric}"
    if any(key not in run for run in runs):
        return {"task": task.name, "runs": runs}
    choose = min if task.main_metric == "mse" else max
    by_rate = {}
    for one in runs:
        by_rate.setdefault(one["learning_rate"], []).append(one[key])
    rate, scores = choose(by_rate.items(), key=lambda item: statistics.mean(item[1]))
    return {
        "task": task.name,
        "metric": task.main_metric,
        "learning_rate": rate,
        "mean": statistics.mean(scores),
        "std": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "seeds": len(scores),
        "best": choose(run[key] for run in runs),
        "majority": task.majority(),
        "runs": runs,
    }


def table(summaries: list[dict]) -> str:
    """Markdown: the scores of all tasks, and their mean."""
    lines = ["| task | metric | majority class | mean ± std | seeds | best run | learning rate |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    rows = [summary for summary in summaries if "mean" in summary]
    for row in rows:
        majority = "" if row["majority"] is None else f"{100 * row['majority']:.2f}"
        lines.append(
            f"| {row['task']} | {row['metric']} | {majority} | {100 * row['mean']:.2f} ± {100 * row['std']:.2f} "
            f"| {row['seeds']} | {100 * row['best']:.2f} | {row['learning_rate']:g} |"
        )
    if len(rows) > 1:
        mean, best = (100 * statistics.mean(row[name] for row in rows) for name in ("mean", "best"))
        lines.append(f"| average | | | {mean:.2f} | | {best:.2f} | |")
    return "\n".join(lines)


def main():
    args, training = parse_arguments([GlueArguments, TrainingArguments], __doc__)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO if training.process_index == 0 else logging.ERROR)
    output_dir = Path(training.output_dir)
    summaries = []
    try:
        if args.task_name is None:
            data = [load_files(args.train_file, args.validation_file, args.test_file)]
        else:
            data = [load_task(name, args.dataset_path) for name in args.task_name]
    except ValueError as error:
        sys.exit(f"error: {error}")
    for one in data:
        task = Task(one, args)
        folder = output_dir if len(data) == 1 else output_dir / task.name
        summaries.append(summarize(task, (sweep if args.sweep else single)(task, training, folder)))
        if training.process_index == 0:
            write_json(output_dir / "results.json", summaries)
            (output_dir / "results.md").write_text(table(summaries) + "\n", encoding="utf-8")
    logger.info("\n%s\n\nsaved in %s", table(summaries), output_dir)


if __name__ == "__main__":
    main()
