"""Norms over the last axis, of width d, and where in a block they stand. They are those of the released TNN code.

    simplermsnorm   x / (rms(x) + eps),                                  rms(x) = ||x||_2 / sqrt(d)
    rmsnorm         weight * x / (rms(x) + eps)
    gatedrmsnorm    weight * x / (rms(x) + eps) * sigmoid(gate * x)
    scalenorm       weight * x / sqrt(mean(x^2) + eps),                  weight a scalar
    layernorm       the ordinary affine LayerNorm
    batchnorm       the ordinary affine BatchNorm over all real tokens of a batch

eps is `rms_norm_eps` outside the root in the RMS norms, 1e-8 in encoders, and 1e-5 inside the root in the others. All
norms compute in float32 or float64, for inputs and parameters of any dtype, and return the dtype of the input.

A row below eps, such as one of zeros, has no direction. Its derivative by the formula is up to 1 / eps = 1e8 in each
of the RMS norms, and their product overflows. Such a row gets the gradient of the identity instead.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig

from .numerics import by_parts, compute_dtype, is_exported, is_on_host, is_recomputed, must_be_eager, without_narrowing


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """`(..., d)` to `(..., 1)`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5


def bound_gradient(y: torch.Tensor, x: torch.Tensor, rms: torch.Tensor, eps: float) -> torch.Tensor:
    """`y`, with the gradient of `x` in rows whose `rms` is below `eps`."""
    recorded = y.requires_grad and not is_exported()
    return torch.where(rms < eps, y.detach() + (x - x.detach()), y) if recorded else y


class RowNormalization(torch.autograd.Function):
    """x / (rms(x) + eps), and the gradient of `bound_gradient` in half of the time that its operations take."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float) -> torch.Tensor:
        rms = root_mean_square(x)
        ctx.save_for_backward(x, rms)
        ctx.eps = eps
        return x / (rms + eps)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        x, rms = ctx.saved_tensors
        rms = root_mean_square(x) if torch.is_grad_enabled() else rms  # (..., 1), for a second derivative too
        small = rms < ctx.eps
        scale = (rms + ctx.eps).masked_fill(small, 1)
        along = (gradient * x).mean(-1, keepdim=True) / scale / rms.masked_fill(small, torch.inf)
        return torch.addcmul(gradient, x, along, value=-1) / scale, None


class SimpleRMSNorm(nn.Module):
    """The RMS norm x / (rms(x) + eps), without parameters."""

    eps = 1e-8

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def normalized(chosen: slice) -> torch.Tensor:
            part = x if chosen == slice(None) else x[..., chosen, :]
            return self.normalize(part.to(compute_dtype(x.dtype))).to(x.dtype)

        return by_parts(normalized, x.shape[-2], x.numel() // max(1, x.shape[-2]), x, dim=-2)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of `x` `(..., d)` in float32 or float64."""
        if x.requires_grad and torch.is_grad_enabled() and not must_be_eager():
            return RowNormalization.apply(x, self.eps)
        rms = root_mean_square(x)
        return bound_gradient(x / (rms + self.eps), x, rms, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class RMSNorm(SimpleRMSNorm):
    """A `SimpleRMSNorm` with a learned scale per channel."""

    def __init__(self, size: int):
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(size))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return super().normalize(x) * self.weight.to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """An `RMSNorm` times a sigmoid gate of its input."""

    def __init__(self, size: int):
        super().__init__(size)
        self.gate = nn.Parameter(torch.ones(size))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return super().normalize(x) * torch.sigmoid(self.gate.to(x.dtype) * x)


class RootRMSNorm(RMSNorm):
    """An `RMSNorm` with eps = 1e-6 inside the root: weight * x / sqrt(mean(x^2) + eps), the norm of `hyena_norm`."""

    eps = 1e-6

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


class ScaleNorm(RootRMSNorm):
    """A `RootRMSNorm` with eps = 1e-5 and one learned scale for all channels."""

    eps = 1e-5

    def __init__(self, size: int):
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(1))


class LayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm` for inputs and parameters of different dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, weight, bias = (one.to(compute_dtype(x.dtype)) for one in (x, self.weight, self.bias))
        return nn.functional.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class BatchNorm(nn.BatchNorm1d):
    """A `torch.nn.BatchNorm1d` over the tokens of a batch. With a mask, its statistics leave out padding.

    They stay in float32 at least, where small changes count. A layer that is computed again counts a batch once.
    """

    def __init__(self, size: int):
        super().__init__(size)
        mean, var = self.running_mean, self.running_var  # the default dtype may be a half
        self.running_mean, self.running_var = (one.to(compute_dtype(one.dtype)) for one in (mean, var))

    def _apply(self, fn, recurse=True):
        return super()._apply(without_narrowing(fn, (self.running_mean, self.running_var)), recurse)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, with a mask `(B, L)`. While training, the result is zero at padding."""
        tokens, counts = x.to(self.running_mean.dtype), self.training and not is_recomputed()
        if counts:
            self.num_batches_tracked += 1
        if attention_mask is None or not self.training:
            return self._normalize_rows(tokens.flatten(0, -2), counts).view_as(x).to(x.dtype)
        real = attention_mask.ne(0)
        if not is_on_host(real):
            return self._normalize_real(tokens, real[..., None], counts).to(x.dtype)
        y = torch.zeros_like(tokens)
        y[real] = self._normalize_rows(tokens[real], counts)
        return y.to(x.dtype)

    def _normalize_rows(self, x: torch.Tensor, counts: bool) -> torch.Tensor:
        """The norm of `x` `(N, d)`."""
        known = (self.running_mean, self.running_var)
        if self.training and not counts:  # a backward pass must find as many tensors as the forward pass saved
            known = tuple(one.clone() for one in known)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.batch_norm(x, *known, weight, bias, self.training, self.momentum, self.eps)

    def _normalize_real(self, x: torch.Tensor, real: torch.Tensor, counts: bool) -> torch.Tensor:
        """The norm of `x` `(B, L, d)` by masked sums, `real` `(B, L, 1)`: indexing is a device sync."""
        count = real.sum()
        known = count.clamp(min=1)
        mean = x.masked_fill(~real, 0).sum((0, 1)) / known  # (d,)
        centred = (x - mean).masked_fill(~real, 0)  # (B, L, d)
        variance = centred.square().sum((0, 1)) / known  # (d,)
        if counts:
            with torch.no_grad():
                share = self.momentum * count.sign().to(x.dtype)  # 0 without real tokens
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), share)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return (centred * (variance + self.eps).rsqrt() * weight + bias).masked_fill(~real, 0)


def with_mask(norm: nn.Module, attention_mask: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """`norm` as a function of its input alone. Only a batch norm takes the mask."""
    return partial(norm, attention_mask=attention_mask) if isinstance(norm, BatchNorm) else norm


NORM_TYPES = {
    "simplermsnorm": SimpleRMSNorm,
    "rmsnorm": RMSNorm,
    "gatedrmsnorm": GatedRMSNorm,
    "scalenorm": ScaleNorm,
    "layernorm": LayerNorm,
    "batchnorm": BatchNorm,
}


def build_norm(config: PreTrainedConfig, width: int, norm_type: str | None = None) -> nn.Module:
    """The norm of this type, by default `config.norm_type`, with the eps of the configuration if it is an RMS norm."""
    norm = NORM_TYPES[norm_type or config.norm_type](width)
    if isinstance(norm, SimpleRMSNorm) and not isinstance(norm, RootRMSNorm):
        norm.eps = config.rms_norm_eps
    return norm


def build_final_norm(config: PreTrainedConfig) -> nn.Module:
    """The norm after the last block of a pre-norm model; else an identity."""
    if config.norm_position != "pre":
        return nn.Identity()
    if config.final_norm_type not in (None, "layernorm"):
        return build_norm(config, config.hidden_size, config.final_norm_type)
    by_batch = config.norm_type == "batchnorm" and config.final_norm_type is None
    return BatchNorm(config.hidden_size) if by_batch else LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


NORM_POSITIONS = {
    "pre": lambda x, norm, sublayer: x + sublayer(norm(x)),
    "post": lambda x, norm, sublayer: norm(x + sublayer(x)),
    "res_post": lambda x, norm, sublayer: x + norm(sublayer(x)),
}
