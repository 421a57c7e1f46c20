"""Train and evaluate an image classifier."""

import logging
from dataclasses import dataclass

import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from transformers import (
    AutoModelForImageClassification,
    PreTrainedConfig,
    TrainingArguments,
    set_seed,
)

from modeling_tnn import PoleCallback
from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.common.classification import accuracy, describe, report, save, score
from tnn_scripts.common.costs import dry_run
from tnn_scripts.common.grouping_trainer import GroupingTrainer
from tnn_scripts.common.mixing_trainer import MixingTrainer
from tnn_scripts.common.model_path import check_path
from tnn_scripts.common.peers import vit_like
from tnn_scripts.common.trainer import exit_with_message, train
from tnn_scripts.data.augmentation import AUGMENTATIONS, ToPixels, unchanged
from tnn_scripts.data.lra import limit
from tnn_scripts.options.images import ImageArguments

EVALUATED = ("validation", "test")


@dataclass(frozen=True)
class Pictures:
    """The data: the splits train and validation or test, and the names of the columns."""

    splits: DatasetDict
    image: str
    label: str

    @property
    def classes(self) -> list[str]:
        return self.splits["train"].features[self.label].names


def load_pictures(args: ImageArguments) -> Pictures:
    """The splits, with at most as many rows as the options allow.

    Raises:
        ValueError: a column of pictures or of classes is missing, or a split for training or evaluation.
    """
    check_path(args.dataset_name, "--dataset_name")
    splits = load_dataset(args.dataset_name, args.dataset_config_name)
    evaluated = [name for name in EVALUATED if name in splits]
    if "train" not in splits or not evaluated:
        raise ValueError(
            f"--dataset_name must have the splits train and one of {', '.join(EVALUATED)}, got {args.dataset_name} "
            f"with {', '.join(splits)}"
        )
    features = splits["train"].features
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    label = args.label_column_name or (labels[0] if labels else None)
    if not images or label not in labels:
        raise ValueError(
            f"--dataset_name must have a column of pictures and one of classes, got {args.dataset_name} with the "
            f"columns {', '.join(features)}"
        )
    rows = {"train": args.max_train_samples} | dict.fromkeys(evaluated, args.max_eval_samples)
    return Pictures(DatasetDict({name: limit(splits[name], count) for name, count in rows.items()}), images[0], label)


def build_config(args: ImageArguments, classes: list[str]) -> PreTrainedConfig:
    """The configuration of the preset, or of a transformer of its size, with the classes of the data.

    Raises:
        ValueError: an override is not a field of the configuration, or has a value outside its limits.
    """
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: label for label, name in enumerate(classes)}}
    config = load_config(
        args.config_name, {"num_labels": len(classes)} | names, parse_overrides(args.config_overrides)
    )
    return vit_like(config) if args.transformer else config


def prepare(rows: Dataset, pictures: Pictures, to_pixels: ToPixels) -> Dataset:
    """The rows with `pixel_values` and `labels`, made when a row is read."""

    def transform(batch: dict) -> dict:
        pixels = torch.stack([to_pixels(image.convert("RGB")) for image in batch[pictures.image]])
        return {"pixel_values": pixels, "labels": batch[pictures.label]}

    return rows.with_transform(transform)


def run(args: ImageArguments, training: TrainingArguments):
    """Train, evaluate and save.

    Raises:
        ValueError: the data or the configuration are wrong.
        StopRequested: a process got a signal during the training; the last step is in a checkpoint.
        MemoryExceededError: a batch does not fit into memory.
        SavingError: the model could not be written.
    """
    set_seed(training.seed)
    training.remove_unused_columns = False  # the inputs are computed from the columns when a row is read
    pictures = load_pictures(args)
    config = build_config(args, pictures.classes)
    augmentation = AUGMENTATIONS[args.augmentation]
    processor = augmentation.processor(config.image_size)
    to_pixels = {"train": augmentation.to_pixels(processor, config.image_size)}
    splits = {
        name: prepare(rows, pictures, to_pixels.get(name, unchanged(processor, config.image_size)))
        for name, rows in pictures.splits.items()
    }
    trainer = (MixingTrainer if augmentation.mixed else GroupingTrainer)(
        model=AutoModelForImageClassification.from_config(config),
        args=training,
        train_dataset=splits.pop("train"),
        eval_dataset=next(iter(splits.values())),
        processing_class=processor,
        compute_metrics=accuracy,
        callbacks=[PoleCallback()],
        groups=args.groups(),
    )
    if args.dry_run:
        dry_run(trainer)
    train(trainer, pictures.splits["train"][pictures.label], augmentation=args.augmentation)
    save(trainer, vars(args))  # before the evaluations, which may run out of memory
    results = {
        "task": args.dataset_name,
        "model": "transformer" if args.transformer else config.tno_type,
        "config": args.config_name,
        "config_overrides": args.config_overrides,
        "augmentation": args.augmentation,
        **describe(trainer),
        **score(trainer, splits, {name: pictures.splits[name][pictures.label] for name in splits}),
    }
    report(trainer, results)


def start(args: ImageArguments, options: dict):
    """Run with the options of the program, and those of `TrainingArguments`."""
    training = TrainingArguments(**options)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with exit_with_message(training, args.overwrite_output_dir, args.dry_run):
        run(args, training)
