"""Decoding a rational transfer function: the companion form as a shift register.

    w_t = u_t - sum_i a_i w_{t-i},    y_t = k_0 u_t + sum_i c_i w_{t-i},    i = 1 .. N                          (1)

B batch, D channels, N order, L length of a chunk. RTF paper, section 3.3 (companion form), with the exact c and k_0
of `rational.py`. The state is the last N values of w, in float64, O(N) a token.

A chunk needs no stepping. What the old values of w add to (1) ends after N tokens, e_t = -sum_{i>t} a_i w_{t-i}; then
w = g * (u + e), g the power series of 1/a(z), and y follows from w by a filter of N taps: O(L log L).
"""

from functools import cached_property
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
        order: N.
        trained_length: over which the recurrence must hold its precision.

    Raises (where a text is continued):
        ValueError: poles outside the unit circle make the recurrence lose its precision over the trained length.
    """

    def __init__(self, operator, order: int, trained_length: int):
        super().__init__(operator)
        self.order, self.trained_length = order, trained_length

    def forget(self):
        for name in ("_form", "_reversed", "_stable"):
            vars(self).pop(name, None)

    def channel_major(self, v: torch.Tensor) -> torch.Tensor:
        return v.transpose(1, 2).to(widest_dtype(v.device))

    def start(self, state, x: torch.Tensor):
        nothing = x.new_zeros(*x.shape[:2], self.order)  # (B, D, N)
        w = self._filter(self._form, x, nothing)
        self._check_finite(w)
        state.register = ShiftRegister(nothing, self.order)
        state.register.append(w)

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.register.last(self.order)  # (B, D, N)
        denominator, numerator = self._reversed
        now = x[..., 0]  # (B, D)
        y = self._form.direct * now + torch.linalg.vecdot(past, numerator)
        newest = now - torch.linalg.vecdot(past, denominator)
        self._check_finite(newest)
        state.register.append(newest[..., None])
        return y[..., None]

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.register.last(self.order)
        w = self._filter(self._form, x, past)  # (B, D, L)
        self._check_finite(w)
        y = self._read(self._form, x, past, w)
        state.register.append(w)
        return y

    def hold(self, state) -> tuple:
        return (state.register.lend(self.order),)

    def outputs(self, held: tuple, x: torch.Tensor) -> torch.Tensor:
        form = self.operator.companion_form()
        return self._read(form, x, held[0], self._filter(form, x, held[0]))

    def removable(self, state) -> int:
        return min(state.length, state.register.end - self.order)

    def take_back(self, state, count: int):
        state.register.drop(count)

    @cached_property
    def _form(self) -> CompanionForm:
        form = CompanionForm(*(part.detach() for part in self.operator.companion_form()))
        if not is_contracting(form):
            self._check_growth(form)
        return form

    @cached_property
    def _reversed(self) -> list[torch.Tensor]:
        return [part.flip(1).contiguous() for part in self._form[:2]]  # (D, N) each, for lags N .. 1

    @cached_property
    def _stable(self) -> bool:
        return is_contracting(self._form)

    def _filter(self, form: CompanionForm, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """w for the inputs `(B, D, L)` after the values `past` `(B, D, N)`."""
        order, length, product = self.order, x.shape[-1], self.operator.product
        taps = monic(form.denominator)  # (D, N+1)
        after = pad(past, (0, order)).transpose(1, 2)  # (B, 2N, D)
        echoed = causal_toeplitz_matmul(after, taps, product)[:, order:]  # (B, N, D): -e
        driven = x - pad(echoed.transpose(1, 2), (0, length - order))  # (B, D, L)
        series = reciprocal_series(form.denominator, length)  # (D, L)
        return causal_toeplitz_matmul(driven.transpose(1, 2), series, product).transpose(1, 2)

    def _read(self, form: CompanionForm, x: torch.Tensor, past: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """y for the inputs `(B, D, L)`, whose w `(B, D, L)` come after `past` `(B, D, N)`."""
        whole = torch.cat([past, w], dim=-1).transpose(1, 2)  # (B, N+L, D)
        taps = pad(form.numerator, (1, 0))  # (D, N+1)
        y = causal_toeplitz_matmul(whole, taps, self.operator.product)[:, self.order :].transpose(1, 2)  # (B, D, L)
        return y + form.direct[:, None] * x

    def _check_growth(self, form: CompanionForm):
        growth = reciprocal_series(form.denominator, self.trained_length).abs().amax(dim=1)  # (D,)
        diverging = ~(growth <= LARGEST_GROWTH)
        if diverging.any():
            channel = diverging.nonzero()[0].item()
            raise ValueError(self._explain(form, channel, "over the length the model was trained for"))

    def _check_finite(self, w: torch.Tensor):
        if not self._stable and not torch.isfinite(w).all():
            bad = (~torch.isfinite(w)).transpose(0, 1).flatten(1).any(dim=1)  # (D,)
            raise ValueError(self._explain(self._form, bad.nonzero()[0].item(), "on a text of this length"))

    def _explain(self, form: CompanionForm, channel: int, where: str) -> str:
        companion = companion_matrix(form.denominator[channel : channel + 1].cpu())  # (1, N, N)
        radius = torch.linalg.eigvals(companion).abs().max().item()
        return (
            f"Layer {self.operator.layer_idx}, channel {channel}: a pole of radius {radius:.6f} makes the recurrence "
            f"diverge {where}. Generate with use_cache=False, or train with rtf_constraint='l1_montel'."
        )


def is_contracting(form: CompanionForm) -> bool:
    """Whether, by the triangle inequality, no pole reaches the circle: then nothing diverges or need be looked at."""
    return bool((form.denominator.abs().sum(1) < 1).all())
