"""Convolution along a sequence by cuDNN, for GPUs: `cudnn.ops.fft_causal_conv1d` of nvidia-cudnn-frontend.

    y = (k * v)[first .. first + L - 1]                                                                     (1)

B batch, L length, D channels, K taps.

cuDNN computes y[t] = sum_j k[j] v[t - j] from t = 0 on, in and out in one dtype. For `first` > 0, which bidirectional
filters need, (1) is its result for `v` with `first` zeros behind it, without the first entries. It pads to the lengths
of its transforms by itself. The taps and their gradient have the dtype of `v`.

cuDNN's own backward pass cannot be differentiated again, so it stands inside a function that can. That function keeps
its inputs alone, and computes (1) again before cuDNN's backward pass. Activations and gates are separate operations.
"""

from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

from .gating import differentiable_gradients, must_differentiate
from .numerics import next_fast_len
from .toeplitz_fused import eager_windows, single_window

# What cuDNN computes on.
DEVICES = ("cuda",)

NEEDS = "nvidia-cudnn-frontend with cuDNN 9.26 or newer"

OLDEST = 92600

# Up to so many taps, sequences may have any length; beyond, taps and sequence together so many entries. (Limits of all
# dtypes and GPUs; some have higher ones.)
ANY_LENGTH_TAPS, MOST_ENTRIES = 2**12, 2**23


class CudnnConvolution(torch.autograd.Function):
    """Equation (1) for `v` `(B, L, D)`, `kernel` `(D, K)` of any precision, and `first`."""

    @staticmethod
    def forward(ctx, v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
        ctx.save_for_backward(v, kernel)
        ctx.first = first
        return by_cudnn(v, kernel, first)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        v, kernel = ctx.saved_tensors
        function = by_operations if must_differentiate(gradient) else by_cudnn
        function = partial(function, first=ctx.first)
        return *differentiable_gradients(function, (v, kernel), ctx.needs_input_grad, gradient), None


def by_cudnn(v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
    """Equation (1). It can be differentiated once."""
    y = cudnn_function()(pad(v.transpose(1, 2), (0, first)), kernel.to(v.dtype))  # (B, D, L + first)
    return y[..., first:].transpose(1, 2)


def by_operations(v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
    """Equation (1) by PyTorch's own operations."""
    size = next_fast_len(v.shape[1] + max(first, kernel.shape[1] - 1 - first))
    return eager_windows(v.permute(2, 0, 1), kernel, None, None, None, single_window(size, first)).permute(1, 2, 0)


@lru_cache
def cudnn_function():
    """`cudnn.ops.fft_causal_conv1d`, or None where it is not installed, or too old."""
    try:
        import cudnn

        return cudnn.ops.fft_causal_conv1d if cudnn.backend_version() >= OLDEST else None
    except (ImportError, AttributeError, OSError, RuntimeError):  # missing, old, or without its libraries
        return None
