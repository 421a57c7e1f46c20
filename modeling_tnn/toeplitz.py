"""Multiply with Toeplitz matrices, one for each channel, by the fast Fourier transform.

    y_i = sum_{j=0}^{L-1} t_{i-j} v_j,    i = 0 .. L-1                                                      (1)

B batch, L length, D channels, K kernel taps, F transform length.

The Fourier matrix diagonalises a circulant matrix of size F, C_{i,j} = c_{(i-j) mod F}: C x = ifft(fft(c) fft(x)).
With c = (t_{-(L-1)} .. t_{L-1}, 0 ..), x = (v_0 .. v_{L-1}, 0 ..) and F >= 2L - 1, (1) is at the entries L-1 .. 2L-2
of C x. With a causal kernel c = (t_0 .. t_{K-1}, 0 ..) and F >= L + K - 1, it is at the first L entries.

torch.export records one graph for all lengths. Padding and slicing check L <= F, which the graph cannot derive from
the formula of `next_fast_len`; indexing does not. In ONNX, where runtimes may lack transforms and complex numbers,
transforms are products with real matrices, O(L F) for an even F:

    X_m = sum_t x_t (cos(2 pi m t / F) - i sin(2 pi m t / F)),                                m = 0 .. F/2
    x_t = 1/F sum_m w_m (Re X_m cos(2 pi m t / F) - Im X_m sin(2 pi m t / F)),    w_0 = w_{F/2} = 1, else 2
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .extensions import extensions
from .numerics import compute_dtype, is_exported, is_exported_to_onnx, is_fused, is_on_host, must_be_eager
from .toeplitz_fused import (
    LARGEST_RISE,
    LONGEST_SUMS,
    NO_GATE,
    Gate,
    eager_windows,
    fused_convolution,
    has_parameters,
    is_response,
    rise,
    windows_of,
)


def exported_convolution(x: torch.Tensor, kernel: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the circular convolution of `x` `(B, D, L)` and `kernel` `(D, K)`."""
    length = x.shape[-1]
    if is_exported_to_onnx():
        product = matrix_transform(x, size).times(matrix_transform(kernel, size))
        return inverse_matrix_transform(product, size, first, length)
    product = torch.fft.rfft(zero_padded(x, size)) * torch.fft.rfft(zero_padded(kernel, size))  # (B, D, F/2+1)
    return entries(torch.fft.irfft(product, n=size), first, length)


def exported_quotient(above: torch.Tensor, below: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """The first `count` entries `(D, count)` of the circular quotient of two series `(D, N)`."""
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


class Pair(NamedTuple):
    """Complex numbers as their real and imaginary parts, of the same shape, which every exporter supports."""

    real: torch.Tensor
    imag: torch.Tensor

    def times(self, other: "Pair") -> "Pair":
        """The product, entry by entry."""
        real = self.real * other.real - self.imag * other.imag
        return Pair(real, self.real * other.imag + self.imag * other.real)

    def over(self, other: "Pair") -> "Pair":
        """The quotient, entry by entry."""
        square = other.real.square() + other.imag.square()
        return self.times(Pair(other.real / square, -other.imag / square))


def matrix_transform(x: torch.Tensor, size: int) -> Pair:
    """The transform `torch.fft.rfft(x, n=size)` of `x` `(..., L)` by a matrix product, for L <= F = `size`."""
    angle = _angles(0, x.shape[-1], size, x)  # (L, F/2+1)
    return Pair(x @ angle.cos(), -(x @ angle.sin()))


def inverse_matrix_transform(spectrum: Pair, size: int, first: int, count: int) -> torch.Tensor:
    """Entries `first .. first + count - 1` of `torch.fft.irfft(.., n=size)`, `(..., count)`, by a matrix product."""
    frequency, dtype = torch.arange(size // 2 + 1, device=spectrum.real.device), spectrum.real.dtype
    weight = torch.where((frequency == 0) | (frequency == frequency[-1]), 1.0, 2.0).to(dtype)
    weight = weight / (2 * frequency[-1]).to(dtype)  # (F/2+1,)
    angle = _angles(first, count, size, spectrum.real).t()  # (F/2+1, count)
    return (spectrum.real * weight) @ angle.cos() - (spectrum.imag * weight) @ angle.sin()


def _angles(first: int, count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """2 pi m t / F from t = `first` on, `(count, F/2 + 1)`: whole turns are left out before digits are lost."""
    time = torch.arange(first, first + count, device=like.device)
    frequency = torch.arange(size // 2 + 1, device=like.device)
    period = 2 * frequency[-1]  # F as a tensor: the exporter supports no remainder by a size
    turn = torch.remainder(time[:, None] * frequency, period).to(like.dtype) / period.to(like.dtype)
    # A tensor: the exporter rounds numbers to float32.
    return turn * torch.tensor(2 * math.pi, dtype=like.dtype, device=like.device)


def toeplitz_matmul(
    v: torch.Tensor, coefficients: torch.Tensor, implementation: str = "fused", gate: Gate = NO_GATE
) -> torch.Tensor:
    """The product of a sequence with Toeplitz matrices, one for each channel: equation (1).

    Args:
        v: `(B, L, D)`, real, any floating-point dtype.
        coefficients: `(D, 2L - 1)`, the lags -(L-1) .. L-1 in this order. Or `(D, 2R - 1)` for another number of
            lags: missing lags (R < L) are zero, and lags beyond the sequence (R > L) are not used.
        implementation: `"fused"` (fast) or `"eager"` (PyTorch's own operations), with the same values and derivatives;
            `"triton"`, for GPUs, which rounds the coefficients to the dtype of `v`; or `"auto"`, the faster one.
        gate: the gate around the product, see `toeplitz_fused.py`; none unless given.

    Returns:
        `(B, L, D)` in the dtype of `v`. It is computed in float32, or in float64 if `v` or `coefficients` are float64.

    Raises:
        TypeError: an argument is not a tensor of real floating-point numbers.
        ValueError: the shapes or the devices do not fit, or `implementation` is unknown.
    """
    length, channels = _checked_shape(v, "coefficients", coefficients)
    if coefficients.dim() != 2 or coefficients.shape[0] != channels or coefficients.shape[1] % 2 == 0:
        raise ValueError(
            f"`coefficients` must have shape (D, 2L-1) = {(channels, 2 * length - 1)} for v of shape "
            f"{tuple(v.shape)}, or another odd number of lags, got {tuple(coefficients.shape)}"
        )
    reach = length if is_exported() else min(length, (coefficients.shape[1] + 1) // 2)
    return gated_convolution(v, fit_lags(coefficients, reach), reach - 1, implementation, gate)


def causal_toeplitz_matmul(
    v: torch.Tensor, kernel: torch.Tensor, implementation: str = "fused", gate: Gate = NO_GATE
) -> torch.Tensor:
    """The product of a sequence with lower triangular Toeplitz matrices: equation (1) with t_k = 0 for k < 0.

    Args:
        v: `(B, L, D)`, real, any floating-point dtype.
        kernel: `(D, K)`, the lags 0 .. K-1. Missing lags (K < L) are zero, and lags beyond the sequence (K > L) are
            not used.

    The other arguments, the result and the errors are those of `toeplitz_matmul`.
    """
    length, channels = _checked_shape(v, "kernel", kernel)
    if kernel.dim() != 2 or kernel.shape[0] != channels or kernel.shape[1] == 0:
        raise ValueError(f"`kernel` must have shape (D, K) with D={channels} and K >= 1, got {tuple(kernel.shape)}")
    kernel = fit_taps(kernel, length) if is_exported() else kernel[:, :length]
    return gated_convolution(v, kernel, 0, implementation, gate)


def gated_convolution(v, kernel, first: int, implementation: str = "fused", gate: Gate = NO_GATE) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel`, inside a gate.

    `kernel` has taps `(D, K)`, or a filter's frequency response `(2, D, F/2 + 1)`: real and imaginary part at the
    frequencies 2 pi m / F, F even and at least L. The imaginary part counts as 0 at m = 0 and m = F/2.
    """
    kernel = kernel.to(compute_dtype(torch.promote_types(v.dtype, kernel.dtype)))
    fused = is_fused(implementation)
    usual = fused and implementation != "triton" and is_on_host(v)
    product = None if usual else extensions.find_product(implementation, v, kernel)
    if product is not None:
        return product(v, kernel, first, gate)
    if v.numel() == 0 and not must_be_eager():
        # MKL refuses transforms of empty tensors. All inputs stay in the graph, so that their gradients are zero.
        return gate.apply(gate.inputs(v), "eager") * kernel.sum().to(v.dtype)
    windows = windows_of(v, kernel, first, several=fused)
    if windows.rises and v.shape[1] <= LONGEST_SUMS and rise(kernel, first) > LARGEST_RISE:
        return gate.apply(exact_product(gate.inputs(v), kernel, first).to(v.dtype), "eager")
    if fused and not has_parameters(gate.act):
        return fused_convolution(v, kernel, windows, gate)
    # Autograd computes the gradients of the gate, and of parameters of its activation, around the product.
    x = gate.inputs(v)
    if fused:
        y = fused_convolution(x, kernel, windows)
    elif is_exported() and not is_response(kernel):
        x = x.transpose(1, 2).to(kernel.dtype)  # (B, D, L)
        y = exported_convolution(x, kernel, windows.size, first).transpose(1, 2).to(v.dtype)
    else:
        y = eager_windows(x.permute(2, 0, 1), kernel, None, None, None, windows).permute(1, 2, 0)
    return gate.apply(y, "eager")  # (B, L, D)


def exact_product(v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
    """The convolution of `gated_convolution` as sums in float64, O(L^2), for taps `(D, K)` that rise without measure.

    A transform rounds all outputs by the largest tap, so that the first ones would depend on the length.
    """
    length, x = v.shape[1], v.permute(2, 1, 0).double()  # (D, L, B)
    lags = pad(kernel.double(), (length - 1 - first, length + first - kernel.shape[1]))  # (D, 2L-1)
    rows = lags.flip(1).unfold(1, length, 1)  # (D, L, L), the last output first
    parts = rows.split(max(1, 2**22 // (length * len(lags))), dim=1)
    return torch.cat([part @ x for part in parts], dim=1).flip(1).permute(2, 1, 0)


def dense_toeplitz(coefficients: torch.Tensor) -> torch.Tensor:
    """The Toeplitz matrices of equation (1), entry by entry. They are the oracle of the fast products.

    Args:
        coefficients: `(D, 2L - 1)`, the lags -(L-1) .. L-1 in this order.

    Returns:
        `(D, L, L)` with `[d, i, j] = t_{i-j}` of channel d.

    Raises:
        TypeError: `coefficients` is not a tensor.
        ValueError: it does not have two dimensions, or the number of lags is even.
    """
    if not isinstance(coefficients, torch.Tensor):
        raise TypeError(f"`coefficients` must be a tensor, got {type(coefficients).__name__}")
    if coefficients.dim() != 2 or coefficients.shape[1] % 2 == 0:
        raise ValueError(f"`coefficients` must have shape (D, 2L-1), got {tuple(coefficients.shape)}")
    length = (coefficients.shape[1] + 1) // 2
    position = torch.arange(length, device=coefficients.device)
    return coefficients[:, position[:, None] - position[None, :] + length - 1]  # (D, L, L)


def fit_lags(coefficients: torch.Tensor, reach: int) -> torch.Tensor:
    """Two-sided coefficients `(D, 2R - 1)`, cut or padded with zeros to `(D, 2 reach - 1)`."""
    given = (coefficients.shape[1] + 1) // 2
    if is_exported():
        return pad(coefficients, (reach, reach))[:, given : given + 2 * reach - 1]
    missing = reach - given
    return coefficients if missing == 0 else pad(coefficients, (missing, missing))


def fit_taps(kernel: torch.Tensor, length: int) -> torch.Tensor:
    """A causal kernel `(D, K)`, cut or padded with zeros to `(D, length)`."""
    if is_exported():
        return pad(kernel, (0, length))[:, :length]
    return pad(kernel, (0, length - kernel.shape[1]))


def _checked_shape(v: torch.Tensor, name: str, kernel: torch.Tensor) -> tuple[int, int]:
    """L and D of `v`, after a check of `v` and of the `kernel` called `name`."""
    for argument, value in (("v", v), (name, kernel)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"`{argument}` must be a tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"`{argument}` must hold real floating-point numbers, got {value.dtype}")
    if v.dim() != 3 or v.shape[1] == 0:
        raise ValueError(f"`v` must have shape (B, L, D) with L >= 1, got {tuple(v.shape)}")
    if v.device != kernel.device:
        raise ValueError(f"`{name}` must be on the device of v, {v.device}, got {kernel.device}")
    return v.shape[1], v.shape[2]
