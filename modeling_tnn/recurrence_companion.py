"""Decoding a rational transfer function: the companion form as a shift register.

    w_t = u_t - sum_i a_i w_{t-i},    y_t = k_0 u_t + sum_i c_i w_{t-i},    i = 1 .. N                          (1)

B batch, D channels, N order, L length of a chunk. RTF paper, section 3.3 (companion form), with the exact c and k_0
of `rational.py`. The state is the last N values of w, in float64, O(N) a token.

A chunk needs no stepping. What the old values of w add to (1) ends after N tokens, e_t = -sum_{i>t} a_i w_{t-i}; then
w = g * (u + e), g the power series of 1/a(z), and y follows from w by a filter of N taps: O(L log L).
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .rational import companion_matrix, monic, reciprocal_series
from .recurrence import Recurrence
from .register import ShiftRegister
from .toeplitz import causal_toeplitz_matmul, widest_dtype

# Growth of g over the trained length that leaves float64 the digits of float32 and some.
LARGEST_GROWTH = 1e6


class CompanionForm(NamedTuple):
    """The coefficients of (1), per channel."""

    denominator: torch.Tensor  # (D, N)
    numerator: torch.Tensor  # (D, N)
    direct: torch.Tensor  # (D,)


class CompanionRecurrence(Recurrence):
    """Exact decoding of an `RtfOperator`.

    Args:
        operator: has `companion_form()`.
        trained_length: over which the recurrence must hold its precision.

    Raises (where a text is continued):
        ValueError: poles outside the unit circle make the recurrence lose its precision over the trained length.
    """

    def __init__(self, operator, trained_length: int):
        super().__init__(operator)
        self.trained_length = trained_length

    def channel_major(self, v: torch.Tensor) -> torch.Tensor:
        return v.transpose(1, 2).to(widest_dtype(v.device))

    def start(self, state, x: torch.Tensor):
        self.form = CompanionForm(*(part.detach() for part in self.operator.companion_form()))
        self._reversed = [part.flip(1).contiguous() for part in self.form[:2]]  # (D, N) each, for lags N .. 1
        # By the triangle inequality no pole reaches the circle: nothing can diverge, nothing need be looked at.
        self._stable = bool((self.form.denominator.abs().sum(1) < 1).all())
        if not self._stable:
            self._check_growth()
        nothing = x.new_zeros(*x.shape[:2], self.form.denominator.shape[1])  # (B, D, N)
        state.register = ShiftRegister(nothing, nothing.shape[-1])
        state.register.append(self._filter(x, nothing))

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.register.last(self.form.denominator.shape[1])  # (B, D, N)
        denominator, numerator = self._reversed
        now = x[..., 0]  # (B, D)
        y = self.form.direct * now + torch.linalg.vecdot(past, numerator)
        newest = now - torch.linalg.vecdot(past, denominator)
        self._check_finite(newest)
        state.register.append(newest[..., None])
        return y[..., None]

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.register.last(self.form.denominator.shape[1])
        w = self._filter(x, past)  # (B, D, L)
        whole = torch.cat([past, w], dim=-1).transpose(1, 2)  # (B, N+L, D)
        taps = pad(self.form.numerator, (1, 0))  # (D, N+1)
        y = causal_toeplitz_matmul(whole, taps)[:, past.shape[-1] :].transpose(1, 2)  # (B, D, L)
        state.register.append(w)
        return y + self.form.direct[:, None] * x

    def removable(self, state) -> int:
        return min(state.length, state.register.end - self.form.denominator.shape[1])

    def take_back(self, state, count: int):
        state.register.drop(count)

    def _filter(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """w for the inputs `(B, D, L)` after the values `past` `(B, D, N)`."""
        order, length = past.shape[-1], x.shape[-1]
        taps = monic(self.form.denominator)  # (D, N+1)
        echoed = causal_toeplitz_matmul(pad(past, (0, order)).transpose(1, 2), taps)[:, order:]  # (B, N, D): -e
        driven = x - pad(echoed.transpose(1, 2), (0, length - order))  # (B, D, L)
        series = reciprocal_series(self.form.denominator, length)  # (D, L)
        w = causal_toeplitz_matmul(driven.transpose(1, 2), series).transpose(1, 2)
        self._check_finite(w)
        return w

    def _check_growth(self):
        growth = reciprocal_series(self.form.denominator, self.trained_length).abs().amax(dim=1)  # (D,)
        diverging = ~(growth <= LARGEST_GROWTH)
        if diverging.any():
            raise ValueError(self._explain(diverging.nonzero()[0].item(), "over the length the model was trained for"))

    def _check_finite(self, w: torch.Tensor):
        if not self._stable and not torch.isfinite(w).all():
            bad = (~torch.isfinite(w)).transpose(0, 1).flatten(1).any(dim=1)  # (D,)
            raise ValueError(self._explain(bad.nonzero()[0].item(), "on a text of this length"))

    def _explain(self, channel: int, where: str) -> str:
        companion = companion_matrix(self.form.denominator[channel : channel + 1].cpu())  # (1, N, N)
        radius = torch.linalg.eigvals(companion).abs().max().item()
        return (
            f"Layer {self.operator.layer_idx}, channel {channel}: a pole of radius {radius:.6f} makes the recurrence "
            f"diverge {where}. Generate with use_cache=False, or train with rtf_constraint='l1_montel'."
        )
