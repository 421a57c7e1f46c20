"""Train and evaluate an image classifier: pictures, their augmentation, and the Trainer that mixes them.

`flip` mirrors half of the training pictures. `deit` is the recipe of DeiT (Touvron et al., 2021, table 9), which the
released program for the image models of the TNN paper has as its default, by timm: a random part of the picture,
mirrored or not, RandAugment and a rectangle of noise; then mixed pictures, each three times in a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from PIL import Image as Pillow
from PIL import ImageOps
from torch.utils.data import Sampler
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
# DeiT evaluates the middle 224 of 256 pixels.
SHOWN = 224 / 256
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# timm clips magnitudes at 10, where its "posterize" keeps no bits of a colour, which Pillow refuses.
LARGEST = 9.99
# Mixup or CutMix of each batch, one as often as the other (DeiT, table 9).
MIXUP, CUTMIX = 0.8, 1.0
# A picture comes three times, each time changed otherwise (repeated augmentation, Hoffer et al., 2020).
REPEATS = 3

# From an RGB picture to the pixels `(3, side, side)` that the model reads.
ToPixels = Callable[[Pillow.Image], torch.Tensor]


def processor_of(name: str, side: int) -> ViTImageProcessor:
    """The processor of an augmentation: of the whole picture, or, as in DeiT, of its middle by ImageNet's mean."""
    if name != "deit":
        return ViTImageProcessor(size={"height": side, "width": side})
    return ViTImageProcessor(
        size={"shortest_edge": int(side / SHOWN)},
        resample=Pillow.Resampling.BICUBIC,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_DEVIATION,
    )


def training_pixels(name: str, processor: ViTImageProcessor, side: int) -> ToPixels:
    """Return the transform of training images with an augmentation."""
    if name == "deit":
        return deit(side)
    plain = unchanged(processor)
    return plain if name == "none" else lambda image: plain(ImageOps.mirror(image) if torch.rand(()) < 0.5 else image)


def unchanged(processor: ViTImageProcessor) -> ToPixels:
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def deit(side: int) -> ToPixels:
    """DeiT's changes of one picture, by timm."""
    try:
        from timm.data import create_transform
        from timm.data.auto_augment import RandAugment
    except ImportError as error:
        raise ImportError(f'--augmentation deit needs timm ({error}): pip install "modeling-tnn[images]"') from error
    colours = {"mean": IMAGENET_MEAN, "std": IMAGENET_DEVIATION, "interpolation": "bicubic"}
    changes = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"}
    transform = create_transform(side, is_training=True, **changes, **colours)
    for operation in next(step for step in transform.transforms if isinstance(step, RandAugment)).ops:
        operation.magnitude_max = LARGEST
    return transform


class RepeatingSampler(Sampler[int]):
    """As many rows as there are, in a random order, each `REPEATS` times: an epoch has a third of them."""

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        yield from order.repeat_interleave(REPEATS)[: self.rows].tolist()


class MixingTrainer(GroupingTrainer):
    """Trainer that mixes the pictures of each training batch by timm's `Mixup`. Evaluation sees them as they are.

    The loss is the cross entropy of the mixed targets, with `label_smoothing_factor` in training alone. transformers'
    models would take targets of this shape for several labels at once. timm mixes pairs, so the last batch of an
    epoch, which may have an odd number of pictures, is left out.
    """

    def __init__(self, *arguments, **options):
        from timm.data import Mixup  # optional, and takes a second to import

        super().__init__(*arguments, **options)
        size = self.args.per_device_train_batch_size
        if size % 2:
            raise ValueError(f"--per_device_train_batch_size must be even with mixed pictures, got {size}")
        self.args.dataloader_drop_last = True
        # The loss is a mean over pictures: Trainer must divide it by the accumulation steps itself.
        self.model_accepts_loss_kwargs = False
        smoothing, classes = self.args.label_smoothing_factor, self.model.config.num_labels
        self.mixup = Mixup(mixup_alpha=MIXUP, cutmix_alpha=CUTMIX, label_smoothing=smoothing, num_classes=classes)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return RepeatingSampler(len(self.train_dataset), self.args.seed)

    def compute_loss(self, model, inputs: dict, return_outputs: bool = False, num_items_in_batch=None):
        pixels, targets = inputs["pixel_values"], inputs["labels"]
        if model.training:
            pixels, targets = self.mixup(pixels, targets)
        outputs = model(pixel_values=pixels)
        loss = F.cross_entropy(outputs.logits, targets)
        return (loss, outputs) if return_outputs else loss


@dataclass(frozen=True)
class Pictures:
    """The data: the splits train and validation or test, and the names of the columns."""

    splits: DatasetDict
    image: str
    label: str

    @property
    def classes(self) -> list[str]:
        return self.splits["train"].features[self.label].names

    def prepare(self, split: str, to_pixels: ToPixels) -> Dataset:
        """The rows with `pixel_values` and `labels`, made when a row is read."""

        def transform(batch: dict) -> dict:
            pixels = torch.stack([to_pixels(image.convert("RGB")) for image in batch[self.image]])
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
        processor = processor_of(args.augmentation, config.image_size)
        changed = training_pixels(args.augmentation, processor, config.image_size)
        tests = {name: pictures.prepare(name, unchanged(processor)) for name in pictures.splits if name != "train"}
        trainer = (MixingTrainer if args.augmentation == "deit" else GroupingTrainer)(
            model=AutoModelForImageClassification.from_config(config),
            args=training,
            train_dataset=pictures.prepare("train", changed),
            eval_dataset=next(iter(tests.values())),
            processing_class=processor,
            compute_metrics=accuracy,
            callbacks=[PoleCallback()],
            groups=args.groups(),
        )
        labels = {name: rows[pictures.label] for name, rows in pictures.splits.items()}
        about = {"augmentation": args.augmentation}
        train_classifier(trainer, args, tests, labels, args.dataset_name, compared=about, **about)
