"""A stand-in for the module `cudnn`: the documented function, its limits and its refusals, computed by definition.

Source: "FFT Causal Conv1d" of NVIDIA's documentation of cuDNN (frontend 1.32). Taps are in the order of their lags;
the filter is padded to a power of two from 128 up, and the input to a multiple of it, or both to one length.
"""

from types import SimpleNamespace

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from modeling_tnn.toeplitz import dense_toeplitz, two_sided

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Convolution(torch.autograd.Function):
    """y[t] = sum_j weight[j] x[t - j], in the dtype of both. Its backward pass has no derivative, as in cuDNN."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return by_definition(x.double(), weight.double()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        with torch.enable_grad():
            inputs = [saved.detach().double().requires_grad_() for saved in ctx.saved_tensors]
            found = torch.autograd.grad(by_definition(*inputs), inputs, gradient.double())
        return tuple(one.to(saved.dtype) for one, saved in zip(found, ctx.saved_tensors, strict=True))


def by_definition(x, weight):
    taps = pad(weight, (0, max(0, x.shape[2] - weight.shape[1])))[:, : x.shape[2]]
    return torch.einsum("dij,bdj->bdi", dense_toeplitz(two_sided(taps)), x)


class Stub:
    """The module, on an older GPU than H100. `calls` has the padded shapes that the transforms would see."""

    def __init__(self, version: int = 92600):
        self.ops = SimpleNamespace(fft_causal_conv1d=self.fft_causal_conv1d)
        self.backend_version = lambda: version
        self.calls = []

    def fft_causal_conv1d(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dim() != 3 or weight.dim() != 2 or x.device != weight.device:
            raise ValueError(f"x(3D) and weight(2D) on one device, got {x.shape} and {weight.shape}")
        if x.dtype != weight.dtype or x.dtype not in DTYPES:
            raise TypeError(f"x and weight must have the same dtype, got {x.dtype} and {weight.dtype}")
        if min(*x.shape, *weight.shape) <= 0 or x.shape[1] != weight.shape[0]:
            raise ValueError(f"positive sizes and one filter for each channel, got {x.shape} and {weight.shape}")
        length, taps = x.shape[2], weight.shape[1]
        if taps <= (4096 if x.dtype == torch.float64 else 8192):
            filter_length = max(128, 1 << (taps - 1).bit_length())
            padded = -(-length // filter_length) * filter_length
        else:
            filter_length = padded = max(1 << (taps - 1).bit_length(), 1 << (length - 1).bit_length())
            if not 4096 <= padded <= 2**23:
                raise ValueError(f"a length from 4096 to 8388608, got {padded}")
        self.calls.append((padded, filter_length))
        y = Convolution.apply(pad(x, (0, padded - length)), pad(weight, (0, filter_length - taps)))
        return y[..., :length]
