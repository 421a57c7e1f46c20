"""Products with Toeplitz matrices, one matrix per channel, by the fast Fourier transform. No parameters here.

    y_i = sum_{j=0}^{L-1} t_{i-j} v_j,    i = 0 .. L-1                                                      (1)

B batch, L length, D channels, K kernel taps, F transform length.

From (1) to a transform. A circulant matrix C of size F has entries C_{i,j} = c_{(i-j) mod F}; the Fourier matrix
diagonalises it, so that C x = ifft(fft(c) fft(x)) for any x of F entries. Embed the L x L Toeplitz matrix in the
top left corner of a circulant one: its first column must hold t_0 .. t_{L-1} at the top (lags 0 .. L-1) and
t_{-(L-1)} .. t_{-1} at the bottom (there C_{i,j} with i < j reads c_{F+i-j}), which fits without overlap as soon
as F >= 2L - 1; whatever is in between meets only zeros. With x = (v_0 .. v_{L-1}, 0 .. 0), the first L entries of
C x are (1): O(F log F) instead of O(L^2).

Here the coefficients stay in the order of their lags, t_{-(L-1)} .. t_{L-1}. That is the first column above,
rotated by L - 1, so the same product stands L - 1 places further down: entries L-1 .. 2L-2. A causal kernel
(t_k = 0 for k < 0) needs no rotation, and F >= L + K - 1 for K taps.
"""

import torch
from torch.nn.functional import pad

from .chunked import ChunkedConvolution


def fft_length(minimum: int) -> int:
    """A transform length of at least `minimum` that is fast: a power of two, or 9/16, 5/8 or 3/4 of one.

    Transforms of other smooth lengths take longer per entry than they save, lengths with large prime factors
    several times as long. While a graph is traced, the next multiple of 64, so that one graph serves all lengths.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return (minimum + 63) // 64 * 64
    power = 1 << (minimum - 1).bit_length()
    shorter = [power * sixteenths // 16 for sixteenths in (9, 10, 12)] if power >= 256 else []
    return next((length for length in shorter if length >= minimum), power)


def transform_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of transforms and kernels for inputs of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it (MPS does not)."""
    return torch.float32 if device.type == "mps" else torch.float64


def toeplitz_matmul(v: torch.Tensor, coefficients: torch.Tensor, product: str = "chunked") -> torch.Tensor:
    """Equation (1) for a two-sided kernel.

    Args:
        v: `(B, L, D)`, real, any floating dtype.
        coefficients: `(D, 2L - 1)`, the lags -(L-1) .. L-1 in this order. Or `(D, 2R - 1)` for another reach R:
            missing lags (R < L) are zero, further ones (R > L) are not used.
        product: `"chunked"` or `"plain"`, see `PRODUCTS`.

    Returns:
        `(B, L, D)` in the dtype of `v`; computed in float32, or float64 if `v` or `coefficients` are.

    Raises:
        ValueError: the shapes do not fit.
    """
    length, channels = _checked_shape(v)
    if coefficients.dim() != 2 or coefficients.shape[0] != channels or coefficients.shape[1] % 2 == 0:
        raise ValueError(
            f"coefficients must have shape (D, 2L-1) = {(channels, 2 * length - 1)} for v of shape "
            f"{tuple(v.shape)}, or another odd number of lags, not {tuple(coefficients.shape)}."
        )
    reach = min(length, (coefficients.shape[1] + 1) // 2)
    return _convolve(v, fit_lags(coefficients, reach), fft_length(length + reach - 1), reach - 1, product)


def causal_toeplitz_matmul(v: torch.Tensor, kernel: torch.Tensor, product: str = "chunked") -> torch.Tensor:
    """Equation (1) for a causal kernel of any number of taps.

    Args:
        v: `(B, L, D)`, real, any floating dtype.
        kernel: `(D, K)`, the lags 0 .. K-1. Missing lags (K < L) are zero, further ones (K > L) are not used.
        product: `"chunked"` or `"plain"`, see `PRODUCTS`.

    Returns:
        `(B, L, D)` in the dtype of `v`; computed in float32, or float64 if `v` or `kernel` are.

    Raises:
        ValueError: the shapes do not fit.
    """
    length, channels = _checked_shape(v)
    if kernel.dim() != 2 or kernel.shape[0] != channels or kernel.shape[1] == 0:
        raise ValueError(f"kernel must have shape (D, K) with D={channels} and K >= 1, not {tuple(kernel.shape)}.")
    kernel = kernel[:, :length]
    return _convolve(v, kernel, fft_length(length + kernel.shape[1] - 1), 0, product)


def dense_toeplitz(coefficients: torch.Tensor) -> torch.Tensor:
    """The matrices of equation (1), entry by entry: the oracle of the fast products.

    Args:
        coefficients: `(D, 2L - 1)`, the lags -(L-1) .. L-1 in this order.

    Returns:
        `(D, L, L)` with `[d, i, j] = t_{i-j}` of channel d.

    Raises:
        ValueError: the number of lags is even.
    """
    if coefficients.dim() != 2 or coefficients.shape[1] % 2 == 0:
        raise ValueError(f"coefficients must have shape (D, 2L-1), not {tuple(coefficients.shape)}.")
    length = (coefficients.shape[1] + 1) // 2
    position = torch.arange(length, device=coefficients.device)
    return coefficients[:, position[:, None] - position[None, :] + length - 1]  # (D, L, L)


def two_sided(kernel: torch.Tensor) -> torch.Tensor:
    """A causal kernel `(D, L)` as coefficients `(D, 2L - 1)`, zero at negative lags."""
    return pad(kernel, (kernel.shape[1] - 1, 0))


def fit_lags(coefficients: torch.Tensor, reach: int) -> torch.Tensor:
    """Two-sided coefficients `(D, 2R - 1)` of reach R, cut or padded with zeros to `(D, 2 reach - 1)`."""
    missing = reach - (coefficients.shape[1] + 1) // 2
    return pad(coefficients, (missing, missing))


def multiply_spectrum(v: torch.Tensor, response: torch.Tensor, size: int, first: int = 0) -> torch.Tensor:
    """Circular convolution of the zero-padded `v` `(B, L, D)` with the filters of `response` `(D, size/2 + 1)`.

    Returns:
        Entries `first .. first + L - 1` of the result, `(B, L, D)`, in the dtype of `v`.
    """
    dtype = torch.promote_types(v.dtype, response.real.dtype)
    x = torch.fft.rfft(v.transpose(1, 2).to(dtype), n=size)  # (B, D, F/2+1)
    y = torch.fft.irfft(x * response, n=size)[..., first : first + v.shape[1]]  # (B, D, L)
    return y.transpose(1, 2).to(v.dtype)


def plain_convolution(v: torch.Tensor, kernel: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel` `(D, K)`, by autograd."""
    return multiply_spectrum(v, torch.fft.rfft(kernel, n=size), size, first)  # (B, L, D)


# Two ways to the same product: "plain" is differentiable by PyTorch as often as wanted, and is what is traced by
# torch.compile and torch.export whatever the choice; "chunked" is faster and keeps less, but has one derivative.
PRODUCTS = {"chunked": ChunkedConvolution.apply, "plain": plain_convolution}


def _convolve(v: torch.Tensor, kernel: torch.Tensor, size: int, first: int, product: str) -> torch.Tensor:
    if product not in PRODUCTS:
        raise ValueError(f"product={product!r} is not possible: it must be one of {', '.join(PRODUCTS)}.")
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    kernel = kernel.to(transform_dtype(torch.promote_types(v.dtype, kernel.dtype)))
    return PRODUCTS["plain" if traced else product](v, kernel, size, first)


def _checked_shape(v: torch.Tensor) -> tuple[int, int]:
    if v.dim() != 3 or v.shape[1] == 0:
        raise ValueError(f"v must have shape (B, L, D) with L >= 1, not {tuple(v.shape)}.")
    return v.shape[1], v.shape[2]
