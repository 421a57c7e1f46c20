"""Augmentation of training pictures, and the image processor that evaluates without it.

`flip` mirrors half of the pictures. `deit` is the recipe of DeiT (Touvron et al., 2021, table 9), which the released
program for the image models of the TNN paper has as its default: a random part of the picture, mirrored or not,
RandAugment, and a rectangle of noise; then mixed pictures (`mixing`), each picture three times in a row of an epoch.
All draws come from PyTorch's generator of the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps
from transformers import ViTImageProcessor

from tnn_scripts.data.rand_augment import rand_augment, uniform

# The part of a picture: its share of the area, and its width by its height.
CROP_AREA, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# The rectangle of noise.
ERASED, ERASED_AREA, ERASED_RATIO = 0.25, (0.02, 1 / 3), (0.3, 1 / 0.3)
TRIALS = 10
# Evaluation sees the middle 224 of 256 pixels.
SHOWN = 224 / 256
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augmentation:
    """What happens to a training picture.

    Args:
        change: a function from an RGB picture and the side of the model's pictures to another picture.
        of_recipe: whether the rest of DeiT's recipe is used too: parts of a picture, noise, mixing, repeats, and an
            evaluation of the middle of a picture.
    """

    change: Callable[[Image.Image, int], Image.Image] | None = None
    of_recipe: bool = False


def flip(image: Image.Image, side: int) -> Image.Image:
    """The picture, or its mirror image, each half of the time."""
    return ImageOps.mirror(image) if torch.rand(()) < 0.5 else image


def deit(image: Image.Image, side: int) -> Image.Image:
    """A random part, `(side, side)`, mirrored or not, after RandAugment."""
    return rand_augment(flip(random_part(image, side), side))


AUGMENTATIONS = {"none": Augmentation(), "flip": Augmentation(flip), "deit": Augmentation(deit, of_recipe=True)}


def random_part(image: Image.Image, side: int) -> Image.Image:
    """A random part of the picture, resized to `(side, side)`; the middle if none of ten fits."""
    for _ in range(TRIALS):
        width, height = random_sides(image.width * image.height * uniform(*CROP_AREA), CROP_RATIO)
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = random_start(image.width - width), random_start(image.height - height)
            break
    else:
        ratio = min(max(image.width / image.height, CROP_RATIO[0]), CROP_RATIO[1])
        width, height = min(image.width, round(image.height * ratio)), min(image.height, round(image.width / ratio))
        left, top = (image.width - width) // 2, (image.height - height) // 2
    box = (left, top, left + width, top + height)
    return image.resize((side, side), Image.Resampling.BICUBIC, box)


def erase(pixels: torch.Tensor) -> torch.Tensor:
    """`pixels` `(C, H, W)`, of which a quarter gets a rectangle of normal noise."""
    height, width = pixels.shape[-2:]
    if uniform() >= ERASED:
        return pixels
    pixels = pixels.clone()
    for _ in range(TRIALS):
        across, down = random_sides(height * width * uniform(*ERASED_AREA), ERASED_RATIO)
        if across < width and down < height:
            left, top = random_start(width - across), random_start(height - down)
            part = pixels[:, top : top + down, left : left + across]
            part.copy_(torch.randn(part.shape))
            break
    return pixels


def random_sides(area: float, ratios: tuple[float, float]) -> tuple[int, int]:
    """Width and height of a rectangle; the logarithm of their ratio is uniform."""
    ratio = math.exp(uniform(*map(math.log, ratios)))
    return round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))


def random_start(room: int) -> int:
    return int(torch.randint(room + 1, ()))


def build_processor(augmentation: Augmentation, side: int) -> ViTImageProcessor:
    """The image processor of evaluation: the whole picture, or the middle of it as in DeiT."""
    if not augmentation.of_recipe:
        return ViTImageProcessor(size={"height": side, "width": side})
    return ViTImageProcessor(
        size={"shortest_edge": int(side / SHOWN)},
        resample=Image.Resampling.BICUBIC,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_DEVIATION,
    )


def augmented_pixels(
    images: list[Image.Image], augmentation: Augmentation, processor: ViTImageProcessor, side: int
) -> torch.Tensor:
    """The pixels `(B, 3, side, side)` of RGB training pictures."""
    if augmentation.change is not None:
        images = [augmentation.change(image, side) for image in images]
    if not augmentation.of_recipe:
        return processor(images, return_tensors="pt")["pixel_values"]
    pixels = processor(images, return_tensors="pt", do_resize=False, do_center_crop=False)["pixel_values"]
    return torch.stack([erase(one) for one in pixels])
