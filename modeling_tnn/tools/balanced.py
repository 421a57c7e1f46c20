"""Reduce the order of recurrences (`rtf`, `s4d`, `exponential`, `modal`) by balanced truncation, in float64.

    x_{k+1} = A x_k + b v_k,    y_k = c x_k + head * v,    tap w + k = c A^k b                              (1)
    L^T L = sum_k (c A^k)^T c A^k,    R^T R = sum_k A^k b (A^k b)^T,    L R^T = U diag(sigma) V^T           (2)
    A_r = X A Y,  b_r = X b,  c_r = c Y,    X = sigma^-1/2 U^T L,  Y = R^T V sigma^-1/2,  r first rows      (3)
    max over frequencies of |H - H_r| <= 2 sum_{i > r} sigma_i,                                             (4)

S systems with P outputs each: every channel of `rtf`, `s4d` and `exponential` (P = 1), and all of `modal`, which share
their poles (S = 1). D = S P channels, N order, r order to keep, Q modes, w first taps that are kept, m taps.

sigma are the Hankel singular values. (4) is a theorem (Al-Saggaf and Franklin 1987), also for all outputs of a system
together. It bounds the l2 error of the taps, which is no larger. The sums (2) are doubled, as factors: the sum of 2^j
terms and A^(2^j) give that of 2^(j+1). Nothing is squared, poles need not be simple, and one with
1 - |lambda| = 1e-9 takes 36 doublings.
"""

from typing import NamedTuple

import torch

from ..tno_rtf import RtfOperator, companion_matrix

# Most doublings of the sums, and the largest entry of a power of A that ends them.
DOUBLINGS, FADED = 40, 1e-20


class System(NamedTuple):
    """The matrices of (1), and the Hankel singular values of a balanced system."""

    transition: torch.Tensor  # (S, N, N)
    inputs: torch.Tensor  # (S, N, 1)
    outputs: torch.Tensor  # (S, P, N)
    values: torch.Tensor | None = None  # (S, N), descending

    def tail(self, first: int) -> torch.Tensor:
        """Bounds on the sums of |c A^k b|, k >= `first`, `(S,)`, of a balanced system.

        The l2 norm of the taps from k on is that of sigma^1/2 A^k b, and 2^j taps have 2^(j/2) times it at most.
        """
        step = torch.linalg.matrix_power(self.transition, first)
        state, total = step @ self.inputs, 0.0  # (S, N, 1)
        for _ in range(DOUBLINGS):
            total = total + (first * self.values * state[..., 0].square()).sum(1).sqrt()
            state, step, first = step @ state, step @ step, 2 * first
        return total


def system_of(operator) -> System:
    """The system of an operator in float64, whose first taps stay apart."""
    if isinstance(operator, RtfOperator):
        form = operator.companion_form()
        transition, outputs = companion_matrix(form.denominator), form.numerator
        inputs = torch.zeros_like(outputs)
        inputs[:, 0] = 1
    else:
        poles, outputs = operator.powers(torch.ones(1))[..., 0], operator.complex_residues()  # (D or 1, Q), (D, Q)
        poles = poles.view(-1, outputs.shape[1])  # those of `modal` have no rows
        inputs, transition = torch.ones_like(poles.real), torch.diag_embed(poles.real)
        if poles.imag.any():  # states are the real and the imaginary parts
            turn = torch.diag_embed(poles.imag)
            transition = torch.cat([torch.cat([transition, -turn], 2), torch.cat([turn, transition], 2)], 1)
            inputs, outputs = torch.cat([inputs, 0 * inputs], 1), torch.cat([outputs.real, -outputs.imag], 1)
    return System(transition, inputs[..., None], outputs.real.reshape(len(transition), -1, transition.shape[1]))


def doublings(transition: torch.Tensor, layer: int) -> int:
    """The j for which A^(2^j) is nothing, or a ValueError if a system has a pole on or outside the unit circle."""
    power = transition
    for count in range(DOUBLINGS):
        if power.abs().amax() < FADED:
            return count
        power = power @ power
    radius, system = torch.linalg.eigvals(transition).abs().amax(dim=1).max(dim=0)
    where = f"Layer {layer}, filter {system.item()}: a pole of radius {radius.item():.6f} does not fade"
    raise ValueError(f"{where}, so no order is near it. rtf_constraint='l1_montel' keeps poles inside the unit circle")


def factor(transition: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """F `(S, <= N, N)` with F^T F = sum_k (C A^k)^T C A^k, for A `(S, N, N)` and the rows C `(S, P, N)`."""
    for _ in range(count):
        rows, transition = torch.cat([rows, rows @ transition], dim=1), transition @ transition
        if rows.shape[1] > rows.shape[2]:
            rows = torch.linalg.qr(rows, mode="r").R
    return rows


def balance(system: System, count: int) -> System:
    """The balanced system of all orders, (3) with r = N. States that rounding hides are zero."""
    observed = factor(system.transition, system.outputs, count)  # (S, n, N): L
    reached = factor(system.transition.mT, system.inputs.mT, count)  # (S, n, N): R
    left, values, right = torch.linalg.svd(observed @ reached.mT, full_matrices=False)
    resolved = values > torch.finfo(values.dtype).eps * values.shape[1] * values[:, :1]
    scale = values.rsqrt().where(resolved, 0)[..., None]  # (S, n, 1)
    ahead, back = scale * (left.mT @ observed), (scale * (right @ reached)).mT  # X (S, n, N), Y (S, N, n)
    return System(ahead @ system.transition @ back, ahead @ system.inputs, system.outputs @ back, values)


def truncate(balanced: System, order: int, least: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first `order` states as modes, one of each conjugate pair: tap w + k is Re(residues @ poles^k).

    Returns:
        rates and angles of the poles exp(-rate + i angle) `(S, Q)`, no pole below `least`, and residues `(S, P, Q)`.
    """
    values, vectors = torch.linalg.eig(balanced.transition[:, :order, :order])
    ahead = torch.linalg.solve(vectors, balanced.inputs[:, :order].to(vectors.dtype))  # (S, r, 1)
    residues = (balanced.outputs[..., :order].to(vectors.dtype) @ vectors) * ahead.mT  # (S, P, r)
    share = torch.where(values.imag > 0, 2.0, (values.imag == 0).double())  # a pair counts twice
    share = share.where(residues.abs().amax(dim=1) > 0, 0)
    chosen = share.argsort(dim=1, descending=True)[:, : max(1, int((share > 0).sum(1).max()))]  # (S, Q)
    residues = (residues * share[:, None]).take_along_dim(chosen[:, None], 2)
    poles = values.take_along_dim(chosen, 1)
    return -poles.abs().clamp(least, 1 - 1e-12).log(), poles.angle().abs(), residues
