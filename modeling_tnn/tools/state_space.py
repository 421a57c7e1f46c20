"""State-space models as rational transfer functions and back, and filters for an `RtfOperator`.

    x_{t+1} = A x_t + B u_t,    y_t = C x_t + h_0 u_t                                                        (1)
    H(z) = h_0 + C (z I - A)^-1 B = h_0 + (b_1 z^-1 + .. + b_N z^-N) / (1 + a_1 z^-1 + .. + a_N z^-N)        (2)
    a = poly(eig(A)),    b = poly(eig(A - B C)) - poly(eig(A))                                               (3)
    H(z) = h_0 + sum_i r_i / (z - lambda_i) = h_0 + g prod_i (z - z_i) / prod_i (z - lambda_i)               (4)

D filters, N order, L length, F transform length; poly(r) has the coefficients of the polynomial with the roots r. RTF
paper, equation 5, listing 1 and appendices A.2 to A.4 and B. The paper's b counts h_0 a in; here the direct term
stands apart, as in `tno_rtf.py`. All functions compute in the precision of their inputs. Give float64: a polynomial
with many roots near each other has large coefficients of both signs, whose sums lose digits.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..tno_rtf import CompanionForm, companion_matrix, monic, multiply_series, per_filter


class StateSpace(NamedTuple):
    """The matrices of (1) for each filter."""

    transition: torch.Tensor  # (D, N, N): A
    input: torch.Tensor  # (D, N): B
    output: torch.Tensor  # (D, N): C
    direct: torch.Tensor  # (D,): h_0


class PartialFractions(NamedTuple):
    """The first form of (4), with both poles of each conjugate pair."""

    poles: torch.Tensor  # (D, N), complex
    residues: torch.Tensor  # (D, N), complex
    direct: torch.Tensor  # (D,)


class ZerosPolesGain(NamedTuple):
    """The second form of (4): N - 1 zeros and N poles."""

    zeros: torch.Tensor  # (D, N - 1), complex
    poles: torch.Tensor  # (D, N), complex
    gain: torch.Tensor  # (D,)
    direct: torch.Tensor  # (D,)


def polynomial(roots: torch.Tensor) -> torch.Tensor:
    """The coefficients 1, p_1 .. p_N `(D, N + 1)` of real polynomials with the roots `(D, N)`, both of each pair."""
    coefficients = torch.ones_like(roots[:, :1])
    for root in roots.unbind(1):
        coefficients = pad(coefficients, (0, 1)) - root[:, None] * pad(coefficients, (1, 0))
    return coefficients.real


def from_state_space(system: StateSpace) -> CompanionForm:
    """The transfer function of dense matrices, by (3): two eigenvalue problems for each filter."""
    transition, given, read, direct = system
    denominator = polynomial(torch.linalg.eigvals(transition))[:, 1:]
    closed = transition - given[:, :, None] * read[:, None]  # (D, N, N): A - B C
    return CompanionForm(denominator, polynomial(torch.linalg.eigvals(closed))[:, 1:] - denominator, direct)


def from_partial_fractions(system: PartialFractions) -> CompanionForm:
    """The transfer function of a diagonal system, whose taps are t_k = sum_i r_i lambda_i^(k-1) for k > 0.

    Its numerator is the product of the denominator with the first N taps, b_i = t_i + a_1 t_{i-1} + .. + a_{i-1} t_1.
    A diagonal A with vectors B and C has the residues r = B C.
    """
    poles, residues, direct = system
    exponents = torch.arange(poles.shape[1], device=poles.device)
    taps = (residues[:, None] @ poles[..., None] ** exponents)[:, 0].real  # (D, N): t_1 .. t_N
    coefficients = polynomial(poles)  # (D, N + 1)
    return CompanionForm(coefficients[:, 1:], multiply_series(coefficients, taps, taps.shape[1]), direct)


def from_zeros(system: ZerosPolesGain) -> CompanionForm:
    """The transfer function with these zeros, poles and gains, by (4)."""
    zeros, poles, gain, direct = system
    return CompanionForm(polynomial(poles)[:, 1:], gain[:, None] * polynomial(zeros), direct)


def to_state_space(form: CompanionForm) -> StateSpace:
    """The companion realisation of a transfer function (RTF paper, equation A.4.3)."""
    denominator, numerator, direct = form
    given = torch.zeros_like(numerator)
    given[:, 0] = 1
    return StateSpace(companion_matrix(denominator), given, numerator, direct)


def to_partial_fractions(form: CompanionForm) -> PartialFractions:
    """The diagonal form of a transfer function: r_i = b(lambda_i) / a'(lambda_i). The poles must be distinct."""
    denominator, numerator, direct = form
    poles = torch.linalg.eigvals(companion_matrix(denominator))  # (D, N)
    differences = poles[:, :, None] - poles[:, None] + torch.eye(poles.shape[1], device=poles.device)
    descending = torch.arange(poles.shape[1] - 1, -1, -1, device=poles.device)
    above = (poles[..., None] ** descending * numerator[:, None]).sum(-1)  # (D, N): b at each pole
    return PartialFractions(poles, above / differences.prod(-1), direct)


def to_zeros(form: CompanionForm) -> ZerosPolesGain:
    """The zeros, poles and gains of transfer functions.

    Raises:
        ValueError: a numerator begins with 0, so that it has fewer than N - 1 zeros.
    """
    denominator, numerator, direct = form
    gain = numerator[:, 0]  # (D,)
    if not gain.all():
        raise ValueError("`form` must have numerators whose first coefficient is not 0, got one that is")
    poles = torch.linalg.eigvals(companion_matrix(denominator))  # (D, N)
    zeros = poles[:, :0]  # of order 1
    if numerator.shape[1] > 1:
        zeros = torch.linalg.eigvals(companion_matrix(numerator[:, 1:] / gain[:, None]))
    return ZerosPolesGain(zeros, poles, gain, direct)


def long_division(form: CompanionForm, length: int) -> torch.Tensor:
    """The taps `(D, length)` of transfer functions by long division, t_k = b_k - sum_i a_i t_{k-i} (appendix B.3.1).

    It takes L steps, one after the other, and keeps more digits than power series and transforms if poles are close.
    """
    denominator, numerator, direct = form
    denominator, order = per_filter(denominator, len(numerator)), numerator.shape[1]
    taps = [*numerator.new_zeros(order, len(numerator)).unbind()]
    for k in range(1, length):
        recent = torch.stack(taps[: -order - 1 : -1], dim=-1)  # (D, N): t_{k-1} .. t_{k-N}, without t_0
        echo = (denominator * recent).sum(-1)
        taps.append(numerator[:, k - 1] - echo if k <= order else -echo)
    return torch.stack([direct, *taps[order:]], dim=-1)


@torch.no_grad()
def set_filter(operator, form: CompanionForm):
    """Give an `RtfOperator` these transfer functions. Its kernel at any length and its recurrence are theirs.

    The parameters are those whose F samples give the taps of `form`: the tail of each kernel wraps around, as it does
    in training (`tno_rtf.py`).

    Args:
        operator: an operator without `rtf_constraint`.
        form: `(Q, N)`, `(D, N)` and `(D,)` for Q denominators; if it is bidirectional, those of negative lags follow
            those of positive ones, and their tap k - 1 belongs to the lag -k.

    Raises:
        ValueError: the operator has a constraint, or other shapes.
    """
    if operator.constraint is not None:
        raise ValueError(f"`operator` must have rtf_constraint=None to take any filter, got {operator.constraint!r}")
    owned = CompanionForm(operator.denominator, operator.numerator, operator.direct)
    for name, own, given in zip(form._fields, owned, form, strict=True):
        if own.shape != given.shape:
            raise ValueError(f"`form.{name}` must be of shape {tuple(own.shape)}, got {tuple(given.shape)}")
    denominator, order, size = form.denominator, form.denominator.shape[1], operator.size
    below = per_filter(monic(denominator), len(form.numerator))  # (D, N + 1)
    above = torch.fft.rfft(below, n=size) * torch.fft.rfft(long_division(form, size), n=size)  # (D, F/2+1)
    above = torch.fft.irfft(above, n=size)  # (D, F)
    direct = above[:, 0]  # the only tap at lag 0: a numerator begins at lag 1
    operator.denominator.copy_(denominator)
    operator.numerator.copy_(above[:, 1 : order + 1] - direct[:, None] * below[:, 1:])
    operator.direct.copy_(direct)


@torch.no_grad()
def set_kernel(operator, taps: torch.Tensor):
    """Give an `RtfOperator` explicit kernels: h_0 = k_0, a_i = 0 and b_i = k_i (RTF paper, appendix B.2).

    Initialisations of convolutions become those of a transfer function by it. Training goes on from there.

    Args:
        operator: an operator of order N, with any constraint: denominators of 0 obey all of them.
        taps: `(D, M)` with M <= N + 1 taps; `(2D, M)` if it is bidirectional, see `set_filter`.

    Raises:
        ValueError: there are more taps, or other numbers of filters.
    """
    filters, order = operator.numerator.shape
    if taps.dim() != 2 or len(taps) != filters or not 1 <= taps.shape[1] <= order + 1:
        raise ValueError(f"`taps` must be of shape ({filters}, 1 to {order + 1}), got {tuple(taps.shape)}")
    operator.denominator.zero_()
    operator.direct.copy_(taps[:, 0])
    operator.numerator.copy_(pad(taps[:, 1:], (0, order + 1 - taps.shape[1])))
