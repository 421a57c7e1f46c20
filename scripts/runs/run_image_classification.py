"""Train and evaluate an image classifier."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from transformers import AutoModelForImageClassification, PreTrainedConfig, TrainingArguments

from modeling_tnn import PoleCallback
from tnn_scripts.common.grouping_trainer import GroupingTrainer
from tnn_scripts.common.mixing_trainer import MixingTrainer
from tnn_scripts.common.model_path import check_path
from tnn_scripts.common.parser import load_config, parse_overrides
from tnn_scripts.common.peers import vit_like
from tnn_scripts.common.trainer import accuracy, classifier_run, train_classifier
from tnn_scripts.data.augmentation import AUGMENTATIONS, ToPixels, unchanged
from tnn_scripts.data.lra import limit

if TYPE_CHECKING:
    from tnn_scripts.run_image_classification import ImageArguments

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


def load_pictures(args: "ImageArguments") -> Pictures:
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


def build_config(args: "ImageArguments", classes: list[str]) -> PreTrainedConfig:
    """The configuration of the preset, or of a transformer of its size, with the classes of the data."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: label for label, name in enumerate(classes)}}
    overrides = parse_overrides(args.config_overrides)
    config = load_config(args.config_name, {"num_labels": len(classes)} | names, overrides)
    return vit_like(config) if args.transformer else config


def prepare(rows: Dataset, pictures: Pictures, to_pixels: ToPixels) -> Dataset:
    """The rows with `pixel_values` and `labels`, made when a row is read."""

    def transform(batch: dict) -> dict:
        pixels = torch.stack([to_pixels(image.convert("RGB")) for image in batch[pictures.image]])
        return {"pixel_values": pixels, "labels": batch[pictures.label]}

    return rows.with_transform(transform)


def run(args: "ImageArguments", training: TrainingArguments):
    """Train, evaluate and save."""
    with classifier_run(args, training):
        training.remove_unused_columns = False  # the inputs are computed from the columns when a row is read
        pictures = load_pictures(args)
        config = build_config(args, pictures.classes)
        augmentation = AUGMENTATIONS[args.augmentation]
        processor = augmentation.processor(config.image_size)
        to_pixels = {"train": augmentation.to_pixels(processor, config.image_size)}
        tests = {
            name: prepare(rows, pictures, to_pixels.get(name, unchanged(processor, config.image_size)))
            for name, rows in pictures.splits.items()
        }
        trainer = (MixingTrainer if augmentation.mixed else GroupingTrainer)(
            model=AutoModelForImageClassification.from_config(config),
            args=training,
            train_dataset=tests.pop("train"),
            eval_dataset=next(iter(tests.values())),
            processing_class=processor,
            compute_metrics=accuracy,
            callbacks=[PoleCallback()],
            groups=args.groups(),
        )
        labels = {name: rows[pictures.label] for name, rows in pictures.splits.items()}
        changed = {"augmentation": args.augmentation}
        train_classifier(trainer, args, tests, labels, args.dataset_name, compared=changed, **changed)
