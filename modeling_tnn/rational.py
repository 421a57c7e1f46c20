"""Rational transfer functions and their companion form. No parameters here.

    H(z) = h_0 + (b_1 z^-1 + .. + b_N z^-N) / (1 + a_1 z^-1 + .. + a_N z^-N)                                 (1)

D filters, Q denominators (D, or fewer shared by groups of D/Q consecutive filters), N order, F transform length.
RTF paper, sections 3.1 to 3.3.

Sampling (1) at the F-th roots of unity and transforming back yields F taps whose tails have wrapped around: tap k
is the sum of the impulse response at k, k + F, k + 2F, ... Training fits those taps. The filter with exactly these
taps and no wrapping has the same denominator, the numerator c (row vectors; RTF paper, equation 13)

    b = c (I - A^F),    A the companion matrix with first row -a and ones below the diagonal,                (2)

and, since lag F folds onto lag 0, the direct term h_0 + c A^(F-1) e_1. By (2) the same filter sampled at 2F
points has the numerator c (I - A^2F) = b (I + A^F): no inverse is needed to extend the taps by an octave.
"""

import torch


def rational_kernel(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The taps of (1) without h_0, sampled on `size` points.

    Args:
        denominator: `(Q, N)`, a_1 .. a_N.
        numerator: `(D, N)`, b_1 .. b_N.
        size: even transform length F, above N.

    Returns:
        `(D, F)`.
    """
    ones = torch.ones_like(denominator[:, :1])
    below = torch.fft.rfft(torch.cat([ones, denominator], dim=1), n=size)  # (Q, F/2+1)
    above = torch.fft.rfft(torch.cat([torch.zeros_like(numerator[:, :1]), numerator], dim=1), n=size)  # (D, F/2+1)
    return torch.fft.irfft(above / _per_filter(below, len(numerator)), n=size)


def companion_power(denominator: torch.Tensor, exponent: int) -> torch.Tensor:
    """A^exponent for each denominator, `(Q, N)` to `(Q, N, N)`."""
    order = denominator.shape[1]
    shift = torch.eye(order, dtype=denominator.dtype, device=denominator.device)[:-1]  # (N-1, N)
    companion = torch.cat([-denominator[:, None], shift.expand(len(denominator), -1, -1)], dim=1)  # (Q, N, N)
    return torch.linalg.matrix_power(companion, exponent)


def next_octave(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The numerator `(D, N)` that gives the taps of `numerator` at `size` points when sampled at 2 `size` points."""
    power = _per_filter(companion_power(denominator, size), len(numerator))  # (D, N, N)
    return numerator + torch.einsum("dn,dnm->dm", numerator, power)


def recurrence_numerator(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The numerator c of equation (2), `(D, N)`.

    Raises:
        torch.linalg.LinAlgError: a pole is a `size`-th root of unity.
    """
    power = companion_power(denominator, size)  # (Q, N, N)
    remainder = _per_filter(torch.eye(power.shape[-1], dtype=power.dtype, device=power.device) - power, len(numerator))
    return torch.linalg.solve(remainder.mT, numerator)


def _per_filter(values: torch.Tensor, filters: int) -> torch.Tensor:
    """(Q, ...) to (D, ...): each denominator serves D/Q consecutive filters."""
    return values.repeat_interleave(filters // len(values), dim=0)
