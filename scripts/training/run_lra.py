"""Train and evaluate a classifier on a task of the Long Range Arena."""

from functools import partial

import torch
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
)

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.tools import sequence_pairs
from modeling_tnn.tools.poles import PoleCallback
from tnn_programs.cli.parser import load_config, parse_overrides
from tnn_programs.cli.task_arguments import ClassifierArguments
from tnn_programs.data.lra import Task, load_task
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.peers import modernbert_like
from tnn_programs.training.trainer import accuracy, classifier_run, train_classifier


def build_config(args: ClassifierArguments, task: Task) -> TnnConfig:
    """The configuration of the preset with the changes of the task and the command line."""
    sizes = {"vocab_size": task.vocab_size, "num_labels": task.num_labels}
    if args.max_length is not None:
        sizes["max_position_embeddings"] = args.max_length
    return load_config(args.config_name, sizes, parse_overrides(args.config_overrides))


def build_model(args: ClassifierArguments, config: TnnConfig) -> PreTrainedModel:
    if args.transformer:
        config = modernbert_like(config)
    if args.task != "retrieval":
        return AutoModelForSequenceClassification.from_config(config)
    if args.transformer:
        return sequence_pairs.ModernBertForSequencePairClassification(config)
    return sequence_pairs.TnnForSequencePairClassification(config)


def collate_pairs(tokenizer, rows: list[dict]) -> dict[str, torch.Tensor]:
    """The batch of rows whose `input_ids` are two sequences each."""
    texts = [{"input_ids": ids} for row in rows for ids in row["input_ids"]]
    batch = tokenizer.pad(texts, return_tensors="pt")
    pairs = {key: batch[key].unflatten(0, (-1, 2)) for key in ("input_ids", "attention_mask")}
    return pairs | {"labels": torch.tensor([row["labels"] for row in rows])}


def collate_values(mean: float, deviation: float, rows: list[dict]) -> dict[str, torch.Tensor]:
    """The batch of pictures whose grey values are read as numbers `(B, L, 1)`."""
    batch = default_data_collator(rows)
    return {"input_values": (batch["input_ids"][..., None] - mean) / deviation, "labels": batch["labels"]}


def build_collator(args: ClassifierArguments, tokenizer, grey: tuple[float, float] | None):
    if tokenizer is None:
        return default_data_collator if grey is None else partial(collate_values, *grey)
    return partial(collate_pairs, tokenizer) if args.task == "retrieval" else DataCollatorWithPadding(tokenizer)


def run(args: ClassifierArguments, training: TrainingArguments):
    """Train, test and save."""
    with classifier_run(args, training):
        sizes = args.max_train_samples, args.max_length, args.max_eval_samples
        task, data = load_task(args.task, args.dataset_path, *sizes)
        model = build_model(args, build_config(args, task))
        tokenizer = None if task.tokenizer is None else task.tokenizer()
        grey = task.grey if getattr(model.config, "input_channels", None) else None
        trainer = GroupingTrainer(
            model=model,
            args=training,
            train_dataset=data["train"],
            eval_dataset=data["validation"],
            processing_class=tokenizer,
            data_collator=build_collator(args, tokenizer, grey),
            compute_metrics=accuracy,
            callbacks=[PoleCallback()],
            groups=args.groups(),
        )
        tests = {"validation": data["validation"], "test": data["test"]}
        labels = {name: rows["labels"] for name, rows in ({"train": data["train"]} | tests).items()}
        train_classifier(trainer, args, tests, labels, args.task, max_length=task.max_length, grey=grey)
