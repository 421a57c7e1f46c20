"""RandAugment (Cubuk et al., 2019), as DeiT's recipe names it: `rand-m9-mstd0.5-inc1`.

Each of two operations, drawn with replacement from fifteen, is applied with probability 1/2. Its strength s is
N(9, 0.5^2) / 10, clipped to [0, 1]: a larger s changes more. The name and the ranges are those of timm. All draws come
from PyTorch's generator of the CPU.
"""

from collections.abc import Callable

import torch
from PIL import Image, ImageEnhance, ImageOps

DRAWN, PROBABILITY = 2, 0.5
MAGNITUDE, DEVIATION, LARGEST = 9.0, 0.5, 10.0
DEGREES, SHEAR, SHIFT = 30.0, 0.3, 0.45  # of the angle; of the other side; of the own side
FILL = (124, 116, 104)  # the mean of ImageNet, where a picture was moved away


def uniform(low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand(()).item()


def either(value: float) -> float:
    """`value` or `-value`, each half of the time."""
    return value if uniform() < 0.5 else -value


def affine(image: Image.Image, x: tuple = (1, 0, 0), y: tuple = (0, 1, 0)) -> Image.Image:
    """The picture whose pixel (u, v) is that of `image` at (x, y) @ (u, v, 1)."""
    return image.transform(image.size, Image.Transform.AFFINE, (*x, *y), Image.Resampling.BICUBIC, fillcolor=FILL)


def solarize_add(image: Image.Image, strength: float) -> Image.Image:
    """Dark values become brighter, by 110 at most."""
    added = int(110 * strength)
    return image.point([value + added if value < 128 else value for value in range(256)] * len(image.getbands()))


def enhance(kind: type) -> Callable[[Image.Image, float], Image.Image]:
    """A property of the picture times 1 - 0.9 s or 1 + 0.9 s."""
    return lambda image, strength: kind(image).enhance(1 + either(0.9 * strength))


OPERATIONS = {
    "auto_contrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
    "invert": lambda image, strength: ImageOps.invert(image),
    "rotate": lambda image, strength: image.rotate(
        either(DEGREES * strength), Image.Resampling.BICUBIC, fillcolor=FILL
    ),
    "posterize": lambda image, strength: ImageOps.posterize(image, max(1, 4 - int(4 * strength))),
    "solarize": lambda image, strength: ImageOps.solarize(image, 256 - int(256 * strength)),
    "solarize_add": solarize_add,
    "color": enhance(ImageEnhance.Color),
    "contrast": enhance(ImageEnhance.Contrast),
    "brightness": enhance(ImageEnhance.Brightness),
    "sharpness": enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, strength: affine(image, x=(1, either(SHEAR * strength), 0)),
    "shear_y": lambda image, strength: affine(image, y=(either(SHEAR * strength), 1, 0)),
    "translate_x": lambda image, strength: affine(image, x=(1, 0, either(SHIFT * strength) * image.width)),
    "translate_y": lambda image, strength: affine(image, y=(0, 1, either(SHIFT * strength) * image.height)),
}


def rand_augment(image: Image.Image) -> Image.Image:
    """An RGB picture of the same size, changed by up to two operations."""
    for index in torch.randint(len(OPERATIONS), (DRAWN,)).tolist():
        if uniform() < PROBABILITY:
            magnitude = MAGNITUDE + DEVIATION * torch.randn(()).item()
            image = list(OPERATIONS.values())[index](image, min(max(magnitude / LARGEST, 0.0), 1.0))
    return image
