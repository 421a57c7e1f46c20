"""Train and evaluate a classifier on a task of the Long Range Arena."""

import logging

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from modeling_tnn import PoleCallback, TnnConfig
from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.common.classification import accuracy, describe, report, save, score
from tnn_scripts.common.costs import dry_run
from tnn_scripts.common.grouping_trainer import GroupingTrainer
from tnn_scripts.common.peers import modernbert_like
from tnn_scripts.common.sequence_pairs import (
    ModernBertForSequencePairClassification,
    TnnForSequencePairClassification,
)
from tnn_scripts.common.trainer import exit_with_message, train
from tnn_scripts.data.lra import Task, encode_split, limit, load_task
from tnn_scripts.options.lra import LraArguments


def build_config(args: LraArguments, task: Task) -> TnnConfig:
    """The configuration of the preset with the changes of the task and the command line.

    Raises:
        ValueError: an override is not a field of the configuration, or has a value outside its limits.
    """
    sizes = {"vocab_size": task.vocab_size, "num_labels": task.num_labels}
    if args.max_length is not None:
        sizes["max_position_embeddings"] = args.max_length
    return load_config(args.config_name, sizes, parse_overrides(args.config_overrides))


def build_model(args: LraArguments, config: TnnConfig) -> PreTrainedModel:
    if args.transformer:
        config = modernbert_like(config)
    if args.task != "retrieval":
        return AutoModelForSequenceClassification.from_config(config)
    build = ModernBertForSequencePairClassification if args.transformer else TnnForSequencePairClassification
    return build(config)


def collate_pairs(tokenizer):
    """The batch of rows whose `input_ids` are two sequences each."""

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [{"input_ids": ids} for row in rows for ids in row["input_ids"]]
        batch = tokenizer.pad(texts, return_tensors="pt")
        pairs = {key: batch[key].unflatten(0, (-1, 2)) for key in ("input_ids", "attention_mask")}
        return pairs | {"labels": torch.tensor([row["labels"] for row in rows])}

    return collate


def build_collator(args: LraArguments, tokenizer):
    if tokenizer is None:
        return default_data_collator
    return collate_pairs(tokenizer) if args.task == "retrieval" else DataCollatorWithPadding(tokenizer)


def run(args: LraArguments, training: TrainingArguments):
    """Train, test and save.

    Raises:
        ValueError: the data or the configuration are wrong.
        StopRequested: a process got a signal during the training; the last step is in a checkpoint.
        MemoryExceededError: a batch does not fit into memory.
        SavingError: the model could not be written.
    """
    set_seed(training.seed)
    sizes = args.max_train_samples, args.max_length, args.max_eval_samples
    task, data = load_task(args.task, args.dataset_path, *sizes, args.pair_column)
    config = build_config(args, task)
    model = build_model(args, config)
    tokenizer = None if task.tokenizer is None else task.tokenizer()
    trainer = GroupingTrainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=build_collator(args, tokenizer),
        compute_metrics=accuracy,
        callbacks=[PoleCallback()],
        groups=args.groups(),
    )
    if args.dry_run:
        dry_run(trainer)
    train(trainer, data["train"]["labels"])
    save(trainer, vars(args))  # before the evaluations, which may run out of memory
    tests = {"validation": data["validation"], "test": data["test"]}
    if args.extra_test is not None:
        extra = load_dataset(args.dataset_path, args.extra_test, split="test")
        tests[args.extra_test] = encode_split(task, limit(extra, args.max_eval_samples))
    results = {
        "task": args.task,
        "model": "transformer" if args.transformer else config.tno_type,
        "config": args.config_name,
        "config_overrides": args.config_overrides,
        "max_length": task.max_length,
        **describe(trainer),
        **score(trainer, tests, {name: rows["labels"] for name, rows in tests.items()}),
    }
    report(trainer, results)


def start(args: LraArguments, options: dict):
    """Run with the options of the program, and those of `TrainingArguments`."""
    training = TrainingArguments(**options)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with exit_with_message(training, args.overwrite_output_dir, args.dry_run):
        run(args, training)
