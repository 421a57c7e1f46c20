"""Rational transfer functions and their recurrences. No parameters here.

    H(z) = h_0 + (b_1 z^-1 + .. + b_N z^-N) / (1 + a_1 z^-1 + .. + a_N z^-N)                                 (1)

D filters, Q denominators (D, or fewer shared by groups of D/Q consecutive filters), N order, L length, F transform
length. RTF paper, sections 3.1 to 3.3.

Sampling (1) at the F-th roots of unity and transforming back yields F taps k whose tails have wrapped around: tap t
is the sum of the impulse response at t, t + F, t + 2F, ... Training fits those taps. The filter with exactly these
taps and no wrapping has the same denominator; its numerator c follows from K(z) a(z) = c(z), read at z^-1 .. z^-N:

    c_i = k_i + a_1 k_{i-1} + .. + a_{i-1} k_1                                                              (2)

which is the c of b = c (I - A^F), A the companion matrix (paper, equation 13), without forming A^F. Since lag F folds
onto lag 0, its direct term is the tap k_0, not h_0. Beyond F the taps go on as

    k_t = sum_{i=1}^{N} c_i g_{t-i},    g the power series of 1/a(z)                                        (3)
"""

import torch

from .toeplitz import fft_length


def rational_kernel(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The taps of (1) without h_0, sampled on `size` points.

    Args:
        denominator: `(Q, N)`, a_1 .. a_N.
        numerator: `(D, N)`, b_1 .. b_N.
        size: even transform length F, above N.

    Returns:
        `(D, F)`.
    """
    below = torch.fft.rfft(monic(denominator), n=size)  # (Q, F/2+1)
    above = torch.fft.rfft(torch.cat([torch.zeros_like(numerator[:, :1]), numerator], dim=1), n=size)  # (D, F/2+1)
    return torch.fft.irfft(above / per_filter(below, len(numerator)), n=size)


def monic(denominator: torch.Tensor) -> torch.Tensor:
    """1, a_1 .. a_N: `(Q, N)` to `(Q, N + 1)`."""
    return torch.cat([torch.ones_like(denominator[:, :1]), denominator], dim=1)


def per_filter(values: torch.Tensor, filters: int) -> torch.Tensor:
    """(Q, ...) to (D, ...): each denominator serves D/Q consecutive filters."""
    return values.repeat_interleave(filters // len(values), dim=0)


def multiply_series(first: torch.Tensor, second: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` coefficients of the product of two power series, `(D, K)` and `(D, M)` to `(D, length)`."""
    first, second = first[:, :length], second[:, :length]
    size = fft_length(first.shape[1] + second.shape[1])
    product = torch.fft.irfft(torch.fft.rfft(first, n=size) * torch.fft.rfft(second, n=size), n=size)
    return torch.nn.functional.pad(product, (0, max(0, length - size)))[:, :length]


def reciprocal_series(denominator: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` coefficients of 1/a(z), `(Q, N)` to `(Q, length)`.

    Newton's iteration g <- g (2 - a g) doubles the number of right coefficients: O(L log L).
    """
    a, g = monic(denominator), torch.ones_like(denominator[:, :1])
    while g.shape[1] < length:
        known = min(2 * g.shape[1], length)
        residual = -multiply_series(a, g, known)  # (Q, known)
        residual[:, 0] += 2
        g = multiply_series(g, residual, known)
    return g[:, :length]


def recurrence_numerator(denominator: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Equation (2): the numerator c `(D, N)` of the filter with these `(D, F)` taps, of which 1 .. N are read."""
    order = denominator.shape[1]
    return multiply_series(per_filter(monic(denominator), len(taps)), taps[:, 1 : order + 1], order)


def extend_kernel(denominator: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """The taps `(D, F)` continued to `(D, length)` by equation (3)."""
    numerator = recurrence_numerator(denominator, taps)
    series = per_filter(reciprocal_series(denominator, length), len(taps))  # (D, L)
    beyond = multiply_series(numerator, series, length - 1)[:, taps.shape[1] - 1 :]  # taps F .. L-1
    return torch.cat([taps, beyond], dim=1)
