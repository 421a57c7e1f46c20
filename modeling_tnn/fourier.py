"""Fourier transforms of real sequences in a form that torch.export can record for all lengths. No parameters here.

PyTorch's padding and slicing check whether L entries are within F. A program for all lengths cannot answer this from
the formula of `next_fast_len`. Indexing makes no such check, so these functions index.

For ONNX, transforms are products with matrices:

    X_m = sum_t x_t (cos(2 pi m t / F) - i sin(2 pi m t / F)),                                m = 0 .. F/2
    x_t = 1/F sum_m w_m (Re X_m cos(2 pi m t / F) - Im X_m sin(2 pi m t / F)),    w_0 = w_{F/2} = 1, else 2

L entries of x, F transform length, even. A runtime for ONNX may not support the transforms that the exporter writes
(onnxruntime refuses them), or complex numbers. Every runtime supports products of real matrices. They take O(L F)
instead of O(F log F).
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .numerics import is_exported_to_onnx


def exported_convolution(x: torch.Tensor, kernel: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the circular convolution of `x` `(B, D, L)` with `kernel` `(D, K)`.

    Args:
        size: transform length F, at least L and K.
    """
    length = x.shape[-1]
    if is_exported_to_onnx():
        product = matrix_transform(x, size).times(matrix_transform(kernel, size))
        return inverse_matrix_transform(product, size, first, length)
    product = torch.fft.rfft(zero_padded(x, size)) * torch.fft.rfft(zero_padded(kernel, size))  # (B, D, F/2+1)
    return entries(torch.fft.irfft(product, n=size), first, length)


def exported_quotient(above: torch.Tensor, below: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """The first `count` entries of the circular quotient of two series `(D, N)`, `(D, count)`.

    Args:
        size: transform length F, at least N and `count`.
    """
    if is_exported_to_onnx():
        quotient = matrix_transform(above, size).over(matrix_transform(below, size))
        return inverse_matrix_transform(quotient, size, 0, count)
    # All frequencies: torch.export cannot see that D (F/2 + 1) numbers form rows of F/2 + 1.
    quotient = torch.fft.fft(zero_padded(above, size)) / torch.fft.fft(zero_padded(below, size))  # (D, F)
    return entries(torch.fft.ifft(quotient).real, 0, count)


def zero_padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """`x` `(..., L)` padded with zeros to `(..., size)`, without a check of L <= `size`."""
    index = torch.arange(size, device=x.device).clamp(max=x.shape[-1])
    return pad(x, (0, 1)).index_select(-1, index)


def entries(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Entries `first .. first + count - 1` of `x` `(..., F)`, without a check that they are within F."""
    return x.index_select(-1, torch.arange(first, first + count, device=x.device))


class Spectrum(NamedTuple):
    """A spectrum as real and imaginary part, `(..., F/2 + 1)` each."""

    real: torch.Tensor
    imag: torch.Tensor

    def times(self, other: "Spectrum") -> "Spectrum":
        """The product, entry by entry."""
        real = self.real * other.real - self.imag * other.imag
        return Spectrum(real, self.real * other.imag + self.imag * other.real)

    def over(self, other: "Spectrum") -> "Spectrum":
        """The quotient, entry by entry."""
        square = other.real.square() + other.imag.square()
        return self.times(Spectrum(other.real / square, -other.imag / square))


def matrix_transform(x: torch.Tensor, size: int) -> Spectrum:
    """The transform `torch.fft.rfft(x, n=size)` of `x` `(..., L)` by a matrix product, for L <= F = `size`."""
    angle = _angles(0, x.shape[-1], size, x)  # (L, F/2+1)
    return Spectrum(x @ angle.cos(), -(x @ angle.sin()))


def inverse_matrix_transform(spectrum: Spectrum, size: int, first: int, count: int) -> torch.Tensor:
    """Entries `first .. first + count - 1` of `torch.fft.irfft(.., n=size)`, `(..., count)`, by a matrix product."""
    frequency, period = _frequencies(size, spectrum.real)
    weight = torch.where((frequency == 0) | (2 * frequency == period), 1.0, 2.0).to(spectrum.real.dtype)
    weight = weight / period.to(weight.dtype)  # (F/2+1,)
    angle = _angles(first, count, size, spectrum.real).t()  # (F/2+1, count)
    return (spectrum.real * weight) @ angle.cos() - (spectrum.imag * weight) @ angle.sin()


def _angles(first: int, count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """2 pi m t / F from t = `first` on, `(count, F/2 + 1)`: whole turns are left out before digits are lost."""
    time = torch.arange(first, first + count, device=like.device)
    frequency, period = _frequencies(size, like)
    turn = torch.remainder(time[:, None] * frequency, period).to(like.dtype) / period.to(like.dtype)
    # A tensor: the exporter rounds numbers to float32.
    return turn * torch.tensor(2 * math.pi, dtype=like.dtype, device=like.device)


def _frequencies(size: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """0 .. F/2, `(F/2 + 1,)`, and F as a tensor `()`: the exporter supports a remainder by a tensor, not by a size."""
    frequency = torch.arange(size // 2 + 1, device=like.device)
    return frequency, 2 * frequency[-1]
