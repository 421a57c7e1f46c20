"""Augmentation of training pictures, and the image processor that evaluates without it.

`flip` mirrors half of the pictures. `deit` is the recipe of DeiT (Touvron et al., 2021, table 9), which the released
program for the image models of the TNN paper has as its default, by timm: a random part of the picture, mirrored or
not, RandAugment and a rectangle of noise; then mixed pictures, each three times in a row (`mixing_trainer`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps
from transformers import ViTImageProcessor

# DeiT evaluates the middle 224 of 256 pixels.
SHOWN = 224 / 256
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# timm clips magnitudes at 10, where its "posterize" keeps no bits of a colour, which Pillow refuses.
LARGEST = 9.99

# From an RGB picture to the pixels `(3, side, side)` that the model reads.
ToPixels = Callable[[Image.Image], torch.Tensor]


@dataclass(frozen=True)
class Augmentation:
    """What happens to training pictures."""

    processor: Callable[[int], ViTImageProcessor]  # that of evaluation, for pictures of a side
    to_pixels: Callable[[ViTImageProcessor, int], ToPixels]  # what changes a training picture, by it and the side
    mixed: bool = False  # whether batches are mixed, and pictures repeated


def whole(side: int) -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": side, "width": side})


def middle(side: int) -> ViTImageProcessor:
    """The middle of the picture with the mean and deviation of ImageNet, as in DeiT."""
    return ViTImageProcessor(
        size={"shortest_edge": int(side / SHOWN)},
        resample=Image.Resampling.BICUBIC,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_DEVIATION,
    )


def unchanged(processor: ViTImageProcessor, side: int) -> ToPixels:
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def flip(processor: ViTImageProcessor, side: int) -> ToPixels:
    pixels = unchanged(processor, side)
    return lambda image: pixels(ImageOps.mirror(image) if torch.rand(()) < 0.5 else image)


def deit(processor: ViTImageProcessor, side: int) -> ToPixels:
    """DeiT's changes of one picture, by timm."""
    try:
        from timm.data import create_transform
        from timm.data.auto_augment import RandAugment
    except ImportError as error:
        raise ImportError(f'--augmentation deit needs timm ({error}): pip install "modeling-tnn[images]"') from error
    transform = create_transform(
        side,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        mean=IMAGENET_MEAN,
        std=IMAGENET_DEVIATION,
    )
    for operation in next(step for step in transform.transforms if isinstance(step, RandAugment)).ops:
        operation.magnitude_max = LARGEST
    return transform


AUGMENTATIONS = {
    "none": Augmentation(whole, unchanged),
    "flip": Augmentation(whole, flip),
    "deit": Augmentation(middle, deit, mixed=True),
}
