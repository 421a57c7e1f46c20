"""Fine-tune a model on GLUE tasks, or on files of the same form."""

import copy
import dataclasses
import itertools
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tnn_programs.cli.errors import suggest_smaller

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tnn_programs.cli.atomic import read_json, write_json, write_text
from tnn_programs.cli.commands import next_steps
from tnn_programs.cli.model_path import check_vocabulary, load, require_padding
from tnn_programs.cli.parser import parse_overrides
from tnn_programs.cli.runs import RUN, check_run, find_checkpoint, read_object
from tnn_programs.cli.tables import ERRORS, format_metric, markdown_table
from tnn_programs.cli.training_arguments import GroupArguments, fine_tuning_of
from tnn_programs.data import glue
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.processes import StopRequested
from tnn_programs.training.trainer import logits_of, output_folder, refuse, save, train

logger = logging.getLogger("finetune_glue")


def check_metric(name: str, classes: list[str] | None):
    """Raise a ValueError for a metric that the labels do not have: `classes`, or values if it is None."""
    if classes is None and name not in glue.OF_VALUES:
        raise ValueError(f"--metric_name must be one of {', '.join(glue.OF_VALUES)} for values to predict, got {name}")
    if classes is not None and name == "f1" and len(classes) > 2:
        raise ValueError(f"--metric_name must be another one with more than two classes, got f1 and {len(classes)}")


class Task:
    """A task with its metric and its tokenized data, which all runs of a sweep share."""

    def __init__(self, data: glue.TaskData, args: GroupArguments):
        self.data, self.args, self.name = data, args, data.name or "files"
        self.is_regression = data.label_names is None
        self.metrics = (args.metric_name,) if args.metric_name else glue.metrics_of(data.name, self.is_regression)
        self.main_metric = self.metrics[0]
        check_metric(self.main_metric, data.label_names)
        self.tokenizer = load(AutoTokenizer, args.model_name_or_path, trust_remote_code=args.trust_remote_code)
        require_padding(self.tokenizer, "tnn finetune-glue")
        for names, limit in (
            (["train"], args.max_train_samples),
            (data.validation_splits, args.max_eval_samples),
            (data.test_splits, args.max_predict_samples),
        ):
            for name in names if limit is not None else []:
                data.splits[name] = data.splits[name].select(range(min(limit, len(data.splits[name]))))
        self.new_head = False
        self.config = self.build_config()
        self.splits = glue.tokenize_task(data, self.tokenizer, args.max_seq_length, args.pad_to_max_length)

    def best(self, scores: Iterable, key: Callable = float):
        """The best of some scores, or of what has a score by `key`. What is not a number is the worst."""
        sign = -1 if self.main_metric in ERRORS else 1
        return max(scores, key=lambda one: -math.inf if math.isnan(key(one)) else sign * key(one))

    def build_config(self) -> PreTrainedConfig:
        """The configuration of the model. The labels of the data become numbers of its outputs."""
        source, args, names = self.args.model_name_or_path, self.args, self.data.label_names
        config = load(AutoConfig, source, trust_remote_code=args.trust_remote_code)
        config.update(parse_overrides(args.config_overrides, config))
        check_vocabulary(self.tokenizer, config.vocab_size)
        self.outputs, given = list(range(len(names or []))), None
        if self.is_regression:
            config.num_labels = 1
        elif not args.from_scratch:
            try:
                given = glue.outputs_of_classes(config, names, source)
            except ValueError:
                if not args.ignore_mismatched_sizes:
                    raise
                self.new_head = True
        if given is not None:
            self.outputs = given
            self.data.relabel(dict(enumerate(given)) | {-1: -1})
        elif names is not None:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: index for index, name in config.id2label.items()}
        config.problem_type = "regression" if self.is_regression else "single_label_classification"
        config.pad_token_id = self.tokenizer.pad_token_id
        return config

    def build_model(self) -> PreTrainedModel:
        """The model: a new head on the pretrained weights, its own head, or random weights."""
        args, config = self.args, copy.deepcopy(self.config)
        code = {"trust_remote_code": args.trust_remote_code}
        if args.from_scratch:
            return AutoModelForSequenceClassification.from_config(config, **code)
        code |= {"ignore_mismatched_sizes": args.ignore_mismatched_sizes}
        model = load(AutoModelForSequenceClassification, args.model_name_or_path, config=config, **code)
        if self.new_head:  # transformers draws one only if its size is another
            loaded, model = model, type(model)(config).to(model.dtype)
            setattr(model, model.base_model_prefix, loaded.base_model)
        return model

    def classes(self, outputs: np.ndarray) -> np.ndarray:
        """The classes of the data for numbers of outputs, -1 for an output that is none of them. Values stay."""
        if self.is_regression:
            return np.asarray(outputs)
        found = {output: number for number, output in enumerate(self.outputs)}
        return np.array([found.get(int(output), -1) for output in outputs])

    def shown(self, logits: np.ndarray) -> list[str]:
        """Return each prediction as text: the value, or the name of its class, from the data or else the model."""
        if self.is_regression:
            return [f"{value:.3f}" for value in logits[:, 0]]
        names = self.config.id2label | dict(zip(self.outputs, self.data.label_names, strict=True))
        return [names[output] for output in logits.argmax(axis=1)]

    def compute_metrics(self, evaluated) -> dict[str, float]:
        logits = logits_of(evaluated.predictions)
        predictions = logits[:, 0] if self.is_regression else logits.argmax(axis=1)
        return glue.score(self.metrics, self.classes(predictions), self.classes(evaluated.label_ids))

    def weighted_loss(self, smoothing: float) -> Callable | None:
        """The loss with a weight for each class, for Trainer, if it is asked for: rows by classes, by rows of it."""
        if self.args.class_weights is None or self.is_regression:
            return None
        counts = np.bincount(self.splits["train"]["label"], minlength=self.config.num_labels)
        weights = torch.tensor(counts.sum() / np.maximum(counts, 1) / (counts > 0).sum(), dtype=torch.float32)

        def loss(outputs, labels, num_items_in_batch=None):
            options = {"weight": weights.to(labels.device), "label_smoothing": smoothing, "reduction": "sum"}
            return cross_entropy(outputs["logits"].float(), labels, **options) / (num_items_in_batch or len(labels))

        return loss

    def majority(self) -> float | None:
        """The main metric of a model that always answers the most frequent class of the training data."""
        if self.is_regression:
            return None
        references = self.classes(self.splits[self.data.validation_splits[0]]["label"])
        answer = statistics.mode(self.classes(self.splits["train"]["label"]).tolist())
        return glue.score(self.metrics[:1], np.full_like(references, answer), references)[self.main_metric]


def run_once(task: Task, training: TrainingArguments, keep: bool = False) -> tuple[Trainer, dict]:
    """Train, evaluate and predict as the options say; the Trainer and all figures. `keep`: save what was trained."""
    set_seed(training.seed)
    args = task.args
    trainer = GroupingTrainer(
        model=task.build_model(),
        args=training,
        train_dataset=task.splits["train"] if training.do_train else None,
        eval_dataset=task.splits[task.data.validation_splits[0]],
        processing_class=task.tokenizer,
        compute_metrics=task.compute_metrics,
        compute_loss_func=task.weighted_loss(training.label_smoothing_factor),
        groups=args.groups(),
    )
    results = {}
    if training.do_train:
        compared = {"max_seq_length": args.max_seq_length, "class_weights": args.class_weights}
        results |= train(trainer, task.splits["train"]["label"], **compared)
    if keep:
        save_model(trainer, task, Path(training.output_dir))
    with suggest_smaller("evaluation", "give a smaller --per_device_eval_batch_size or --max_seq_length"):
        for split in task.data.validation_splits if training.do_eval else []:
            rows, suffix = task.splits[split], "_mm" if split.endswith("_mismatched") else ""
            figures = trainer.evaluate(rows) | {"eval_samples": len(rows)}
            results |= {name + suffix: value for name, value in figures.items()}
        for split in task.data.test_splits if training.do_predict else []:
            results |= write_predictions(trainer, task, split)
    return trainer, results


def write_predictions(trainer: Trainer, task: Task, split: str) -> dict[str, float]:
    """Write `predict_results_TASK.txt` in the format of run_glue.py. Return the metrics if all rows have a class."""
    rows = task.splits[split]
    columns = [name for name in rows.column_names if name != "label"]
    labels = rows["label"][:] if "label" in rows.column_names else [None]
    if not task.is_regression and all(label is not None and label >= 0 for label in labels):
        columns.append("label")
    found = trainer.predict(rows.select_columns(columns))
    shown = task.shown(logits_of(found.predictions))
    lines = [f"{index}\t{value}" for index, value in enumerate(shown)]
    if trainer.is_world_process_zero():
        file = Path(trainer.args.output_dir) / f"predict_results_{task.name}{split.removeprefix('test')}.txt"
        write_text(file, "\n".join(["index\tprediction", *lines]) + "\n")
    return {name: value for name, value in found.metrics.items() if name.removeprefix("test_") in task.metrics}


def save_model(trainer: Trainer, task: Task, folder: Path):
    """Save the model, its tokenizer and the options of the training. Predictions of an earlier model go."""
    save(trainer, dataclasses.asdict(task.args) | {"task_name": task.data.name}, folder)
    if trainer.is_world_process_zero():
        for predictions in folder.glob("predict_results_*.txt"):
            predictions.unlink()


def single(task: Task, training: TrainingArguments, folder: Path) -> list[dict]:
    """Do one run with the learning rate and the seed of the command line, and save the model if it was trained."""
    training = with_rate(task, training, folder)
    trainer, results = run_once(task, dataclasses.replace(training, output_dir=str(folder)), keep=training.do_train)
    if trainer.is_world_process_zero():
        file = folder / "all_results.json"
        renewed = not training.do_train and (folder / "training_args.json").is_file() and file.is_file()
        write_json(file, (read_json(file) if renewed else {}) | results)
    return [{"learning_rate": training.learning_rate, "seed": training.seed} | results]


def with_rate(task: Task, training: TrainingArguments, folder: Path) -> TrainingArguments:
    """The options with a learning rate: the given one, that of the checkpoint to resume from, or that of the model."""
    if training.learning_rate is not None:
        return training
    rate, source = TrainingArguments.learning_rate, None
    if task.config.model_type == "tnn" and (known := fine_tuning_of(task.config.hidden_size)):
        rate, source = known
    checkpoint = find_checkpoint(folder, training.resume_from_checkpoint)
    if checkpoint is not None and (checkpoint / RUN).is_file():
        rate, source = read_object(checkpoint / RUN).get("learning_rate", rate), f"that of {checkpoint}"
    if training.do_train and source is not None:
        logger.info("learning rate %g, %s; --learning_rate sets another", rate, source)
    return dataclasses.replace(training, learning_rate=rate)


def sweep(task: Task, training: TrainingArguments, folder: Path) -> list[dict]:
    """Do a run for each learning rate and seed, and keep the best model in `folder`."""
    scores, runs = [], []
    for rate, seed in itertools.product(task.args.sweep_learning_rates, task.args.sweep_seeds):
        place = folder / f"lr{rate:g}-seed{seed}"
        options = {"learning_rate": rate, "seed": seed, "output_dir": str(place), "save_strategy": "no"}
        trainer, results = run_once(task, dataclasses.replace(training, **options, do_train=True, do_eval=True))
        runs.append({"learning_rate": rate, "seed": seed} | results)
        scores.append(results[f"eval_{task.main_metric}"])
        places = [place]
        if scores.index(task.best(scores)) == len(scores) - 1:
            save_model(trainer, task, folder)
            places.append(folder)
        for one in places if trainer.is_world_process_zero() else []:
            write_json(one / "all_results.json", runs[-1])
    return runs


def summarize(task: Task, runs: list[dict]) -> dict:
    """The summary of a task: the learning rate with the best mean over the seeds, and the best run."""
    key, about = f"eval_{task.main_metric}", {"task": task.name}
    if any(key not in run for run in runs):
        return about | {"runs": runs}
    by_rate = {}
    for one in runs:
        by_rate.setdefault(one["learning_rate"], []).append(one)
    means = {rate: statistics.mean(run[key] for run in chosen) for rate, chosen in by_rate.items()}
    rate = task.best(means, key=means.get)
    chosen = by_rate[rate]
    return about | {
        "metric": task.main_metric,
        "learning_rate": rate,
        "mean": means[rate],
        "std": statistics.stdev(run[key] for run in chosen) if len(chosen) > 1 else 0.0,
        "seeds": len(chosen),
        "best": task.best(run[key] for run in runs),
        "majority": task.majority(),
        "others": {name: statistics.mean(run[f"eval_{name}"] for run in chosen) for name in task.metrics[1:]},
        "runs": runs,
    }


def table(summaries: list[dict]) -> str:
    """A Markdown table of the scores of all tasks in percent (errors in their own unit), and their mean."""
    lines, rows = [], [summary for summary in summaries if "mean" in summary]
    for row in rows:
        figures = {name: row[name] for name in ("majority", "mean", "std", "best") if row[name] is not None}
        shown = {name: format_metric(row["metric"], value) for name, value in figures.items()}
        others = ", ".join(f"{name} {format_metric(name, value)}" for name, value in row["others"].items())
        score, begin = f"{shown['mean']} ± {shown['std']}", [row["task"], row["metric"], shown.get("majority")]
        lines.append([*begin, score, row["seeds"], shown["best"], f"{row['learning_rate']:g}", others])
    if len(rows) > 1:
        mean, best = (100 * statistics.mean(row[name] for row in rows) for name in ("mean", "best"))
        lines.append(["average", None, None, f"{mean:.2f}", None, f"{best:.2f}", None, None])
    headers = ["task", "metric", "majority class", "mean ± std", "seeds", "best run", "learning rate", "other metrics"]
    return markdown_table(headers, lines, texts=2)


def check_before_start(args: GroupArguments, training: TrainingArguments):
    """Refuse options that contradict each other."""
    if not (training.do_train or args.sweep or training.do_eval or training.do_predict):
        raise ValueError("one of --do_train, --do_eval, --do_predict and --sweep must be given")
    refuse(training, "push_to_hub")
    if args.sweep and training.resume_from_checkpoint is not None:
        raise ValueError("--sweep must be given without --resume_from_checkpoint: it always starts from the beginning")
    for name, several in {"learning_rate": "sweep_learning_rates", "seed": "sweep_seeds"}.items():
        value = getattr(training, name)
        if args.sweep and value not in (None, getattr(TrainingArguments, name)):
            raise ValueError(f"--{name} must not be given with --sweep, which reads --{several}, got {value}")


def load_data(args: GroupArguments, training: TrainingArguments) -> dict[Path, glue.TaskData]:
    """The data of all tasks, or of the files, by the folder for the model."""
    if args.dataset_name is not None:
        tasks = args.dataset_config_name or [None]
        data = [glue.load_set(args.dataset_name, task, args.sentence_keys, args.label_key) for task in tasks]
    elif args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file
        data = [glue.load_files(*files, args.sentence_keys, args.label_key)]
    else:
        data = [glue.load_task(name, args.dataset_path) for name in args.task_name]
    folder = Path(training.output_dir)
    folders = {folder / one.name if len(data) > 1 else folder: one for one in data}
    for folder, one in folders.items():
        if training.do_predict and not one.test_splits:
            needed = "--test_file" if one.name is None else f"a task that has a test split, got {one.name}"
            raise ValueError(f"--do_predict must be given with {needed}")
        if training.do_train or args.sweep:
            check_run(folder, args.overwrite_output_dir, training.resume_from_checkpoint, args.model_name_or_path)
    return folders


def run_all(args: GroupArguments, training: TrainingArguments) -> list[dict]:
    """Run all tasks; the summary of each."""
    folders, output_dir, summaries = load_data(args, training), Path(training.output_dir), []
    for folder, data in folders.items():
        task = Task(data, args)
        summaries.append(summarize(task, (sweep if args.sweep else single)(task, training, folder)))
        # A run that only reads a trained model keeps the table of its training.
        trained = (folder / "training_args.json").is_file() and not (training.do_train or args.sweep)
        if training.process_index == 0 and not trained:
            write_json(output_dir / "results.json", summaries)
            write_text(output_dir / "results.md", table(summaries) + "\n")
    return summaries


def run(args: GroupArguments, training: TrainingArguments):
    """Run all tasks, and say what came out and what is next."""
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO if training.process_index == 0 else logging.ERROR)
    check_before_start(args, training)
    try:
        with output_folder(training):
            summaries = run_all(args, training)
            logger.info("\n%s\n\nsaved in %s", table(summaries), training.output_dir)
    except StopRequested as request:
        status, message = request.args
        # Of several tasks, those that have not begun have no checkpoint.
        checkpoint = "auto" if len(args.task_name or args.dataset_config_name) > 1 else "latest"
        logger.info("%s%s", message, "" if args.sweep else f" Continue with --resume_from_checkpoint {checkpoint}.")
        sys.exit(status)
    if (training.do_train or args.sweep) and len(summaries) == 1 and training.process_index == 0:
        logger.info("%s", next_steps(training.output_dir, "classifier"))
