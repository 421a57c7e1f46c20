"""Norms over the last axis, of width d, as in the released TNN code.

    simplermsnorm   x / (rms(x) + eps),                                  rms(x) = ||x||_2 / sqrt(d)
    rmsnorm         weight * x / (rms(x) + eps)
    gatedrmsnorm    weight * x / (rms(x) + eps) * sigmoid(gate * x)
    scalenorm       weight * x / sqrt(mean(x^2) + eps),                  weight a scalar
    layernorm       the ordinary affine LayerNorm
    batchnorm       the ordinary affine BatchNorm over all real tokens of a batch

eps is 1e-8 outside the root for the RMS norms, 1e-5 inside it for the other two. All compute in float32 at
least, whatever the dtype of their input and of their parameters, and return the dtype of the input.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .numerics import compute_dtype


class SimpleRMSNorm(nn.Module):
    """x / (rms(x) + 1e-8), without parameters."""

    eps = 1e-8

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalize(x.to(compute_dtype(x.dtype))).to(x.dtype)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / self.size**0.5  # (..., 1)
        return x / (rms + self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class RMSNorm(SimpleRMSNorm):
    """`SimpleRMSNorm` with a scale per channel."""

    def __init__(self, size: int):
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(size))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return super().normalize(x) * self.weight.to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """`RMSNorm` times a sigmoid gate of its input."""

    def __init__(self, size: int):
        super().__init__(size)
        self.gate = nn.Parameter(torch.ones(size))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return super().normalize(x) * torch.sigmoid(self.gate.to(x.dtype) * x)


class ScaleNorm(SimpleRMSNorm):
    """RMS norm with one learned scale for all channels and eps inside the root."""

    eps = 1e-5

    def __init__(self, size: int):
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(1))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for inputs and parameters of different dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(x.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return nn.functional.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class BatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over the tokens of a batch; with a mask, padding has no part in its statistics."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, for a mask `(B, L)`; zero at padding while training."""
        tokens = x.to(self.running_mean.dtype)
        if attention_mask is None or not self.training:
            return super().forward(tokens.flatten(0, -2)).view_as(x).to(x.dtype)
        real = attention_mask.ne(0)
        y = torch.zeros_like(tokens)
        y[real] = super().forward(tokens[real])
        return y.to(x.dtype)


def with_mask(norm: nn.Module, attention_mask: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """`norm` as a function of its input alone; only a batch norm has to know what is padding."""
    return partial(norm, attention_mask=attention_mask) if isinstance(norm, BatchNorm) else norm


NORM_TYPES = {
    "simplermsnorm": SimpleRMSNorm,
    "rmsnorm": RMSNorm,
    "gatedrmsnorm": GatedRMSNorm,
    "scalenorm": ScaleNorm,
    "layernorm": LayerNorm,
    "batchnorm": BatchNorm,
}


def build_norm(norm_type: str, size: int) -> nn.Module:
    """The norm called `norm_type` for a last axis of `size` channels.

    Raises:
        ValueError: there is no such norm.
    """
    if norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type={norm_type!r} is not possible: it must be one of {', '.join(NORM_TYPES)}.")
    return NORM_TYPES[norm_type](size)
