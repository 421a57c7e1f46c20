"""Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a batch, as in DeiT's recipe: one of them, at random.

    mixup:   x_i <- l x_i + (1 - l) x_j                                                l ~ Beta(0.8, 0.8)
    CutMix:  x_i <- x_i with a rectangle of x_j, of 1 - l of the picture before it is cut at the border, l ~ Beta(1, 1)
    both:    y_i <- l y_i + (1 - l) y_j        with j = B - 1 - i, and for CutMix the l that is left of x_i

B pictures in a batch, y one row of K probabilities for each. The draws come from PyTorch's generator of the CPU: no
step on an accelerator waits for one.
"""

import torch
import torch.nn.functional as F

MIXUP, CUTMIX = 0.8, 1.0
SHARE_OF_CUTMIX = 0.5


def mix(pixels: torch.Tensor, labels: torch.Tensor, num_labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed pictures and their targets.

    Args:
        pixels: `(B, C, H, W)`.
        labels: `(B,)`, classes.

    Returns:
        `(B, C, H, W)`, and `(B, num_labels)` of which each row adds up to 1.
    """
    if torch.rand(()) < SHARE_OF_CUTMIX:
        pixels, share = cutmix(pixels, beta(CUTMIX), torch.rand(2).tolist())
    else:
        share = beta(MIXUP)
        pixels = share * pixels + (1 - share) * pixels.flip(0)
    targets = F.one_hot(labels, num_labels).to(torch.float32)  # (B, K)
    return pixels, share * targets + (1 - share) * targets.flip(0)


def beta(concentration: float) -> float:
    """A draw of Beta(concentration, concentration)."""
    return float(torch.distributions.Beta(concentration, concentration).sample())


def cutmix(pixels: torch.Tensor, share: float, centre: list[float]) -> tuple[torch.Tensor, float]:
    """The pictures with a rectangle of others, and the share that is left of each.

    Args:
        pixels: `(B, C, H, W)`.
        share: share that is left if the rectangle is within the picture.
        centre: its centre, from 0 to 1 in rows and in columns.
    """
    cut, left = [], 1.0
    for size, at in zip(pixels.shape[-2:], centre, strict=True):
        side = int(size * (1 - share) ** 0.5)
        start = int(size * at) - side // 2
        cut.append(slice(max(start, 0), min(start + side, size)))
        left *= (cut[-1].stop - cut[-1].start) / size
    mixed = pixels.clone()
    mixed[..., cut[0], cut[1]] = pixels.flip(0)[..., cut[0], cut[1]]
    return mixed, 1 - left
