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
    """The matrices of (1)."""

    transition: torch.Tensor  # (D, N, N): A
    input: torch.Tensor  # (D, N): B
    output: torch.Tensor  # (D, N): C
    direct: torch.Tensor  # (D,): h_0


class PartialFractions(NamedTuple):
    """The first form of (4), with both poles of each conjugate pair."""

    poles: torch.Tensor  # (D, N), complex
    residues: torch.Tensor  # (D, N), complex
    direct: torch.Tensor  # (D,): h_0


class ZerosPolesGain(NamedTuple):
    """The second form of (4)."""

    zeros: torch.Tensor  # (D, N - 1), complex
    poles: torch.Tensor  # (D, N), complex
    gain: torch.Tensor  # (D,): g
    direct: torch.Tensor  # (D,): h_0


def polynomial(roots: torch.Tensor) -> torch.Tensor:
    """Return the coefficients 1, p_1 .. p_N `(D, N + 1)` of real polynomials with the roots `(D, N)`."""
    coefficients = torch.ones_like(roots[:, :1])
    for root in roots.unbind(1):
        coefficients = pad(coefficients, (0, 1)) - root[:, None] * pad(coefficients, (1, 0))
    return coefficients.real


def from_state_space(system: StateSpace) -> CompanionForm:
    """Return the transfer function of dense matrices, by (3): two eigenvalue problems for each filter."""
    transition, given, read, direct = system
    denominator = polynomial(torch.linalg.eigvals(transition))[:, 1:]
    closed = transition - given[:, :, None] * read[:, None]  # (D, N, N): A - B C
    return CompanionForm(denominator, polynomial(torch.linalg.eigvals(closed))[:, 1:] - denominator, direct)


def from_partial_fractions(system: PartialFractions) -> CompanionForm:
    """Return the transfer function of a diagonal system. A diagonal A with vectors B and C has the residues B C.

    Its taps are t_k = sum_i r_i lambda_i^(k-1), k > 0, and its numerator b_i = t_i + a_1 t_{i-1} + .. + a_{i-1} t_1.
    """
    poles, residues, direct = system
    exponents = torch.arange(poles.shape[1], device=poles.device)
    taps = (residues[:, None] @ poles[..., None] ** exponents)[:, 0].real  # (D, N): t_1 .. t_N
    coefficients = polynomial(poles)  # (D, N + 1)
    return CompanionForm(coefficients[:, 1:], multiply_series(coefficients, taps, taps.shape[1]), direct)


def from_zeros(system: ZerosPolesGain) -> CompanionForm:
    """Return the transfer function with these zeros, poles and gains, by (4)."""
    zeros, poles, gain, direct = system
    return CompanionForm(polynomial(poles)[:, 1:], gain[:, None] * polynomial(zeros), direct)


def to_state_space(form: CompanionForm) -> StateSpace:
    """Return the companion realisation of a transfer function (RTF paper, equation A.4.3)."""
    first = torch.zeros_like(form.numerator)
    first[:, 0] = 1
    return StateSpace(companion_matrix(form.denominator), first, form.numerator, form.direct)


def to_partial_fractions(form: CompanionForm) -> PartialFractions:
    """Return the diagonal form of a transfer function: r_i = b(lambda_i) / a'(lambda_i). Poles must be distinct."""
    poles = torch.linalg.eigvals(companion_matrix(form.denominator))  # (D, N)
    differences = poles[:, :, None] - poles[:, None] + torch.eye(poles.shape[1], device=poles.device)
    descending = torch.arange(poles.shape[1] - 1, -1, -1, device=poles.device)
    above = (poles[..., None] ** descending * form.numerator[:, None]).sum(-1)  # (D, N): b at each pole
    return PartialFractions(poles, above / differences.prod(-1), form.direct)


def to_zeros(form: CompanionForm) -> ZerosPolesGain:
    """Return the zeros, poles and gains of transfer functions.

    Raises:
        ValueError: a numerator begins with 0, so that it has fewer than N - 1 zeros.
    """
    gain = form.numerator[:, 0]  # (D,)
    if not gain.all():
        raise ValueError("`form` must have numerators whose first coefficient is not 0, got one that is")
    poles = torch.linalg.eigvals(companion_matrix(form.denominator))  # (D, N)
    zeros = poles[:, :0]  # of order 1
    if poles.shape[1] > 1:
        zeros = torch.linalg.eigvals(companion_matrix(form.numerator[:, 1:] / gain[:, None]))
    return ZerosPolesGain(zeros, poles, gain, form.direct)


def long_division(form: CompanionForm, length: int) -> torch.Tensor:
    """Return the taps `(D, length)` by long division, t_k = b_k - sum_i a_i t_{k-i} (RTF paper, appendix B.3.1).

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
    """Give an `RtfOperator` without constraint these transfer functions, at any length and when decoding.

    The parameters become those whose F samples are the taps of `form`: the tail of each kernel wraps around, as it
    does in training (`tno_rtf.py`). `form` is `(Q, N)`, `(D, N)` and `(D,)` for Q denominators. In a bidirectional
    operator those of negative lags follow those of positive ones, and their tap k - 1 belongs to the lag -k.

    Raises:
        ValueError: the operator has a constraint, or other shapes.
    """
    if operator.constraint is not None:
        raise ValueError(f"`operator` must have rtf_constraint=None to take any filter, got {operator.constraint!r}")
    for name, given in form._asdict().items():
        if given.shape != (own := getattr(operator, name)).shape:
            raise ValueError(f"`form.{name}` must be of shape {tuple(own.shape)}, got {tuple(given.shape)}")
    size, below = operator.size, per_filter(monic(form.denominator), len(form.numerator))  # (D, N + 1)
    above = torch.fft.rfft(below, n=size) * torch.fft.rfft(long_division(form, size), n=size)  # (D, F/2+1)
    above = torch.fft.irfft(above, n=size)  # (D, F)
    direct = above[:, 0]  # the only tap at lag 0: a numerator begins at lag 1
    operator.denominator.copy_(form.denominator)
    operator.numerator.copy_(above[:, 1 : below.shape[1]] - direct[:, None] * below[:, 1:])
    operator.direct.copy_(direct)


@torch.no_grad()
def set_kernel(operator, taps: torch.Tensor):
    """Give an `RtfOperator` explicit kernels: h_0 = k_0, a_i = 0 and b_i = k_i (RTF paper, appendix B.2).

    So initialisations of convolutions become those of a transfer function. Any constraint allows denominators of 0.
    `taps` is `(D, M)` with M <= N + 1, `(2D, M)` if the operator is bidirectional, see `set_filter`.

    Raises:
        ValueError: there are more taps, or other numbers of filters.
    """
    filters, order = operator.numerator.shape
    if taps.dim() != 2 or len(taps) != filters or not 1 <= taps.shape[1] <= order + 1:
        raise ValueError(f"`taps` must be of shape ({filters}, 1 to {order + 1}), got {tuple(taps.shape)}")
    operator.denominator.zero_()
    operator.direct.copy_(taps[:, 0])
    operator.numerator.copy_(pad(taps[:, 1:], (0, order + 1 - taps.shape[1])))
