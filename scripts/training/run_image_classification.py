"""Train and evaluate an image classifier: pictures, their augmentation and their classes."""

from dataclasses import dataclass

import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from PIL import ImageOps
from transformers import AutoModelForImageClassification, PreTrainedConfig, TrainingArguments, ViTImageProcessor

from modeling_tnn.tools.poles import PoleCallback
from tnn_programs.cli.model_path import check_path
from tnn_programs.cli.parser import load_config, parse_overrides
from tnn_programs.cli.task_arguments import ClassifierArguments
from tnn_programs.data.lra import limit
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.peers import vit_like
from tnn_programs.training.trainer import accuracy, classifier_run, train_classifier

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

    def prepare(self, split: str, processor: ViTImageProcessor, mirrored: float = 0.0) -> Dataset:
        """The rows with `pixel_values` and `labels`, made when a row is read; a share of the pictures is mirrored."""

        def transform(batch: dict) -> dict:
            images = [image.convert("RGB") for image in batch[self.image]]
            if mirrored:
                images = [ImageOps.mirror(image) if torch.rand(()) < mirrored else image for image in images]
            pixels = processor(images, return_tensors="pt")["pixel_values"]
            return {"pixel_values": pixels, "labels": batch[self.label]}

        return self.splits[split].with_transform(transform)


def load_pictures(args: ClassifierArguments) -> Pictures:
    """The splits, with at most as many rows as the options allow."""
    check_path(args.dataset_name, "--dataset_name")
    splits = load_dataset(args.dataset_name, args.dataset_config_name)
    evaluated = [name for name in EVALUATED if name in splits]
    if "train" not in splits or not evaluated:
        needed, found = ", ".join(EVALUATED), ", ".join(splits)
        raise ValueError(f"--dataset_name must have train and one of {needed}, got {args.dataset_name} with {found}")
    features = splits["train"].features
    images, labels = ([name for name, one in features.items() if isinstance(one, k)] for k in (Image, ClassLabel))
    label = args.label_column_name or (labels[0] if labels else None)
    if not images or label not in labels:
        found = f"{args.dataset_name} with the columns {', '.join(features)}"
        raise ValueError(f"--dataset_name must have a column of pictures and one of classes, got {found}")
    rows = {"train": args.max_train_samples} | dict.fromkeys(evaluated, args.max_eval_samples)
    return Pictures(DatasetDict({name: limit(splits[name], count) for name, count in rows.items()}), images[0], label)


def build_config(args: ClassifierArguments, classes: list[str]) -> PreTrainedConfig:
    """The configuration of the preset, or of a transformer of its size, with the classes of the data."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: label for label, name in enumerate(classes)}}
    overrides = parse_overrides(args.config_overrides)
    config = load_config(args.config_name, {"num_labels": len(classes)} | names, overrides)
    return vit_like(config) if args.transformer else config


def run(args: ClassifierArguments, training: TrainingArguments):
    """Train, evaluate and save."""
    with classifier_run(args, training):
        training.remove_unused_columns = False  # the inputs are computed from the columns when a row is read
        pictures = load_pictures(args)
        config = build_config(args, pictures.classes)
        processor = ViTImageProcessor(size={"height": config.image_size, "width": config.image_size})
        tests = {name: pictures.prepare(name, processor) for name in pictures.splits if name != "train"}
        trainer = GroupingTrainer(
            model=AutoModelForImageClassification.from_config(config),
            args=training,
            train_dataset=pictures.prepare("train", processor, 0.5 if args.augmentation == "flip" else 0.0),
            eval_dataset=next(iter(tests.values())),
            processing_class=processor,
            compute_metrics=accuracy,
            callbacks=[PoleCallback()],
            groups=args.groups(),
        )
        labels = {name: rows[pictures.label] for name, rows in pictures.splits.items()}
        about = {"augmentation": args.augmentation}
        train_classifier(trainer, args, tests, labels, args.dataset_name, compared=about, **about)
