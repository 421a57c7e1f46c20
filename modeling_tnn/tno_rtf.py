"""Toeplitz coefficients as the impulse response of a rational transfer function, and its decoding (RTF paper).

    t_0 = h_0,  t_k = [z^-k] b(z)/a(z)  for k > 0,    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N                         (1)
    w_t = u_t - sum_i a_i w_{t-i},    y_t = k_0 u_t + sum_i c_i w_{t-i},    i = 1 .. N                            (2)

B batch, D channels, L length, N order, T = `rtf_truncation_length` the truncation length.

(1) One transform on T points (T + 1 if T is odd) computes the taps, as in the released code, but in float64: for poles
near the unit circle float32 loses all digits. Beyond T the same filter continues (see `rational.py`). A bidirectional
operator has a second filter for negative lags, t_{-k} = its tap k - 1 (its h_0 is the tap of lag -1).
`rtf_constraint="l1_montel"` divides each denominator by sum|a_i| + |s| + 1e-6 with a learned s. Then sum|a_i| < 1, and
all poles lie inside the unit circle (RTF paper, section 3.4, with the scaling of its code).

(2) Decoding uses the companion form (RTF paper, section 3.3) with the exact c and k_0 of `rational.py`. The state is
the last N values of w in float64; a token costs O(N). A chunk of L tokens costs O(L log L): the old values of w
contribute e_t = -sum_{i>t} a_i w_{t-i} to (2), which ends after N tokens. Then w = g * (u + e), where g is the power
series of 1/a(z), and y follows from w by a filter of N taps.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from .history import HistoryBuffer, places, slack_after
from .numerics import compute_dtype, float64_or_widest, is_exported, is_fused, is_on_host, is_traced, is_transformed
from .rational import (
    RationalTaps,
    companion_matrix,
    extend_kernel,
    kernel_of_any_length,
    monic,
    per_filter,
    rational_kernel,
    reciprocal_series,
    recurrence_numerator,
)
from .recurrence import LONG_PROMPT, PIECE, DivergenceError, Recurrence, shared_values
from .stacking import joined
from .tno import ToeplitzOperator
from .toeplitz import causal_toeplitz_matmul

# Largest growth of g over the trained length. float64 then still has more correct digits than float32 needs.
LARGEST_GROWTH = 1e6

# From so many texts on, a step on the CPU is faster as a product of matrices.
BATCH = 4

# Tokens between two looks for values that are not finite, on an accelerator.
PATROL = 64


class CompanionForm(NamedTuple):
    """The coefficients of (2) for each channel: a, c and k_0."""

    denominator: torch.Tensor  # (D, N)
    numerator: torch.Tensor  # (D, N)
    direct: torch.Tensor  # (D,)


class CompanionRecurrence(Recurrence):
    """The exact decoding of an `RtfOperator`.

    Args:
        operator: an operator with `companion_form()`.
        order: the order N.
        trained_length: the length over which the recurrence must keep its precision.

    Raises (when a text is continued):
        DivergenceError: poles outside the unit circle make the recurrence inexact or infinite.
    """

    has_fixed_step = True

    def __init__(self, operator, order: int, trained_length: int):
        super().__init__(operator)
        self.order, self.trained_length = order, trained_length

    def forget(self):
        for name in ("_denominator", "_form", "_reversed", "_both", "_stable"):
            vars(self).pop(name, None)

    def channel_major(self, v: torch.Tensor) -> torch.Tensor:
        return v.transpose(1, 2).to(float64_or_widest(v.device))

    def is_early(self, prompt) -> bool:
        return prompt.length > LONG_PROMPT and not prompt.v.is_meta  # no values there to check the poles by

    def start(self, state, prompt):
        kept = self.order + slack_after(prompt.length)
        series = reciprocal_series(self._denominator, min(PIECE, prompt.length))  # (D, S)
        # What g adds beyond `series` to all inputs together is below the resolution of the outputs. An accelerator
        # reads the whole prompt sooner than it tells the bound.
        resolution = torch.finfo(compute_dtype(prompt.v.dtype)).eps
        if is_on_host(series) and later_bound(self._denominator, series) * prompt.length < resolution:
            prompt = prompt.last(series.shape[1] + kept)
        w = series.new_zeros(len(prompt.v), len(series), self.order)  # (B, D, N)
        for piece in prompt.pieces(PIECE):
            x = self.channel_major(piece.inputs())  # (B, D, S)
            newest = self._filter(self._denominator, x, w[..., -self.order :], series[:, : x.shape[-1]])
            self._check_finite(newest)
            w = torch.cat([w, newest], dim=-1)[..., -kept:]
        state.history = HistoryBuffer(w, self.order)

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.history.last(self.order)  # (B, D, N)
        y, newest = self._next_of_many(past, x) if self._is_batch(past) else self._next(past, x, *self.constants(x))
        # A value that is not finite makes all later ones so. An accelerator would wait at each look.
        if is_on_host(newest) or state.length % PATROL == 0:
            self._check_finite(newest)
        state.history.append(newest)
        return y

    def make_ready(self, state, like: torch.Tensor):
        """Look at the newest value, as `step` does."""
        if is_on_host(like) or state.length % PATROL == 0:
            self._check_finite(state.history.last(1))

    def constants(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *self._reversed, self._form.direct

    def fixed_step(self, state, x: torch.Tensor) -> torch.Tensor:
        buffer, slot = state.history.buffer, state.cursor[0]
        places = slot - torch.arange(self.order, 0, -1, device=x.device)  # (N,)
        past = buffer[..., torch.where(places < 0, places + buffer.shape[-1], places)]  # (B, D, N)
        y, newest = self._next(past, x, *state.constants)
        buffer.index_copy_(2, slot[None], newest)
        return y

    def _next(self, past, x, denominator, numerator, direct) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the value w for one input, `(B, D, 1)` each, after the values `past` `(B, D, N)`."""
        now = x[..., 0]  # (B, D)
        y = direct * now + torch.linalg.vecdot(past, numerator)
        newest = now - torch.linalg.vecdot(past, denominator)
        return y[..., None], newest[..., None]

    def _is_batch(self, past: torch.Tensor) -> bool:
        return len(past) >= BATCH and is_on_host(past)

    def _next_of_many(self, past: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`_next` for many texts, whose states are read once for both products."""
        y, echo = torch.bmm(self._both, past.permute(1, 2, 0)).permute(1, 2, 0).unbind()  # (B, D) each
        now = x[..., 0]
        return (self._form.direct * now + y)[..., None], (now - echo)[..., None]

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.history.last(self.order)
        w = self._filter(self._denominator, x, past)  # (B, D, L)
        self._check_finite(w)
        y = self._read(self._form, x, past, w)
        state.history.append(w)
        return y

    def hold(self, state) -> tuple:
        return (state.history.lend(self.order),)

    def outputs(self, held: tuple, x: torch.Tensor) -> torch.Tensor:
        form = self.operator.companion_form()
        return self._read(form, x, held[0], self._filter(form.denominator, x, held[0]))

    def max_crop(self, state) -> int:
        return min(state.length, state.history.held - self.order)

    def crop(self, state, count: int):
        state.history.drop(count)

    def put(self, state, other, rows: list[int]):
        state.history.put(other.history, rows, shared_values(state, other, extra=self.order))

    def compact(self, state):
        state.history.compact(state.length + self.order)

    def bytes_per_channel(self, tokens: int, dtype: torch.dtype) -> int:
        return places(self.order, tokens) * float64_or_widest(self.operator.numerator.device).itemsize

    @cached_property
    def _denominator(self) -> torch.Tensor:
        denominator = self.operator.denominators().detach()  # (D, N)
        if not is_contracting(denominator):
            self._check_growth(denominator)
        return denominator

    @cached_property
    def _form(self) -> CompanionForm:
        _, *others = (part.detach() for part in self.operator.companion_form())
        return CompanionForm(self._denominator, *others)

    @cached_property
    def _reversed(self) -> list[torch.Tensor]:
        return [part.flip(1).contiguous() for part in self._form[:2]]  # (D, N) each, for lags N .. 1

    @cached_property
    def _both(self) -> torch.Tensor:
        denominator, numerator = self._reversed
        return torch.stack([numerator, denominator], dim=1)  # (D, 2, N)

    @cached_property
    def _stable(self) -> bool:
        return is_contracting(self._denominator)

    def _filter(
        self, denominator: torch.Tensor, x: torch.Tensor, past: torch.Tensor, series: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The values w of (2) for the inputs `x` `(B, D, L)`, after the earlier values `past` `(B, D, N)`.

        `series` `(D, L)` is g, which is computed if it is not given.
        """
        order, length, implementation = self.order, x.shape[-1], self.operator.implementation
        taps = monic(denominator)  # (D, N+1)
        after = pad(past, (0, order)).transpose(1, 2)  # (B, 2N, D)
        echoed = causal_toeplitz_matmul(after, taps, implementation)[:, order:]  # (B, N, D): -e
        driven = x - pad(echoed.transpose(1, 2), (0, length - order))  # (B, D, L)
        series = reciprocal_series(denominator, length) if series is None else series  # (D, L)
        return causal_toeplitz_matmul(driven.transpose(1, 2), series, implementation).transpose(1, 2)

    def _read(self, form: CompanionForm, x: torch.Tensor, past: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The outputs y of (2) for the inputs `x` and the values `w`, `(B, D, L)` each, after `past` `(B, D, N)`."""
        whole = torch.cat([past, w], dim=-1).transpose(1, 2)  # (B, N+L, D)
        taps = pad(form.numerator, (1, 0))  # (D, N+1)
        y = causal_toeplitz_matmul(whole, taps, self.operator.implementation)[:, self.order :].transpose(
            1, 2
        )  # (B, D, L)
        return y + form.direct[:, None] * x

    def _check_growth(self, denominator: torch.Tensor):
        growth = reciprocal_series(denominator, self.trained_length).abs().amax(dim=1)  # (D,)
        diverging = ~(growth <= LARGEST_GROWTH)
        if diverging.any():
            channel = diverging.nonzero()[0].item()
            raise DivergenceError(self._explain(denominator, channel, "over the length the model was trained for"))

    def _check_finite(self, w: torch.Tensor):
        if not (self._stable or w.is_meta or torch.isfinite(w).all()):
            bad = (~torch.isfinite(w)).transpose(0, 1).flatten(1).any(dim=1)  # (D,)
            channel = bad.nonzero()[0].item()
            raise DivergenceError(self._explain(self._denominator, channel, "on a text of this length"))

    def _explain(self, denominator: torch.Tensor, channel: int, where: str) -> str:
        companion = companion_matrix(denominator[channel : channel + 1].cpu())  # (1, N, N)
        radius = torch.linalg.eigvals(companion).abs().max().item()
        return (
            f"Layer {self.operator.layer_idx}, channel {channel}: a pole of radius {radius:.6f} makes the recurrence "
            f"diverge {where}. Generate with use_cache=False, or train with rtf_constraint='l1_montel'."
        )


def is_contracting(denominator: torch.Tensor) -> bool:
    """Whether sum|a_i| < 1 for all denominators `(D, N)`: all poles lie inside the unit circle, nothing diverges."""
    return denominator.is_meta or bool((denominator.abs().sum(1) < 1).all())


def later_bound(denominator: torch.Tensor, series: torch.Tensor) -> float:
    """A bound of the values of g after its first ones, `series` `(D, S)`, for denominators `(D, N)`, if it is below 1.

    The last N values of the series are all that the later ones depend on. They echo in N inputs, each at most sum|a_i|
    times the largest of them, and each of these inputs starts g once more.
    """
    order = denominator.shape[1]
    last = series[:, -order:].abs().amax(1)  # (D,)
    return (order * last * denominator.abs().sum(1) * series.abs().amax(1)).max().item()


def l1_montel(denominator: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Denominators `(Q, N)` scaled to sum|a_i| < 1, with the slacks s `(A,)`; row i has the slack i mod A."""
    slack = slack.repeat(len(denominator) // len(slack))[:, None]  # (Q, 1)
    return denominator / (denominator.abs().sum(-1, keepdim=True) + slack.abs() + 1e-6)


CONSTRAINTS = {None: lambda denominator, slack: denominator, "l1_montel": l1_montel}

INITIAL_BOUNDS = {"zeros": lambda order: 0.0, "xavier": lambda order: order**-0.5, "montel": lambda order: 1 / order}


class RtfOperator(ToeplitzOperator):
    """The operator of rational transfer functions, equation (1)."""

    is_recurrence = True

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        sides, order = (1 if self.causal else 2), config.rtf_state_size
        num_denominators = config.rtf_num_denominators or self.channels
        self.constraint = config.rtf_constraint
        self.initial_bound = INITIAL_BOUNDS[config.rtf_initializer](order)
        self.size = config.rtf_truncation_length + config.rtf_truncation_length % 2
        self.denominator = nn.Parameter(torch.empty(sides * num_denominators, order))
        self.numerator = nn.Parameter(torch.empty(sides * self.channels, order))
        self.direct = nn.Parameter(torch.empty(sides * self.channels))
        self.slack = nn.Parameter(torch.empty(num_denominators)) if self.constraint == "l1_montel" else None

    def channel_parameters(self) -> dict[str, int]:
        sides = 1 if self.causal else 2
        return {"denominator": sides, "numerator": sides, "direct": sides, "slack": 1}

    @classmethod
    def check_config(cls, config):
        longest = config.rtf_truncation_length
        config.require("rtf_state_size", config.rtf_state_size < longest, f"below rtf_truncation_length={longest}")
        count = config.rtf_num_denominators
        divides = count is None or (count >= 1 and config.gtu_dim % count == 0)
        config.require("rtf_num_denominators", divides, f"a divisor of the GTU width {config.gtu_dim}")

    def reset_parameters(self):
        init.uniform_(self.denominator, -self.initial_bound, self.initial_bound)
        init.uniform_(self.numerator, -self.initial_bound, self.initial_bound)
        init.ones_(self.direct)
        if self.slack is not None:
            init.uniform_(self.slack)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if is_fused(self.implementation) and length <= self.size:
            kernel = RationalTaps.apply(  # (D, L) or (2D, L)
                self._constrained(),
                self.numerator,
                self.direct,
                self.size,
                length,
                float64_or_widest(self.direct.device),
            )
        else:
            kernel = self._kernel(length).to(compute_dtype(self.numerator.dtype))  # (D, L) or (2D, L)
        kernel = kernel.to(device or kernel.device)
        if self.causal:
            return kernel
        positive, negative = kernel.chunk(2)  # (D, L) each
        # Not negative[:, : L - 1]: L - 1 may be 1, which torch.export would rule out.
        return torch.cat([negative.flip(1), positive], dim=1)[:, 1:]  # (D, 2L-1)

    @classmethod
    def kernels_of_layers(cls, operators: Sequence["RtfOperator"], v: torch.Tensor) -> list:
        """Those of one operator with all filters: its fused function saves only its inputs, which `vmap` would not."""
        kernels = joined(operators, operators[0].channel_parameters()).kernel_of(v.shape[1], v.device)
        return list(kernels.unflatten(0, (len(operators), -1)).unbind())

    def recurrence(self) -> CompanionRecurrence:
        self.require_causal()
        return CompanionRecurrence(self, self.numerator.shape[1], self.size)

    def poles(self, most: int = 64) -> torch.Tensor:
        denominator = self._taps()[0]  # (Q, N)
        chosen = denominator[:: -(-len(denominator) // most)]  # (M, N)
        return torch.linalg.eigvals(companion_matrix(chosen))

    def denominators(self) -> torch.Tensor:
        """The denominator of each filter in float64, `(D, N)` (`(2D, N)` if bidirectional)."""
        dtype = float64_or_widest(self.numerator.device)
        return per_filter(self._constrained().to(dtype), len(self.numerator))

    def companion_form(self) -> CompanionForm:
        """The coefficients of the recurrence (2), in float64. Its impulse response is exactly `coefficients`.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        denominator, taps = self._taps()
        numerator = recurrence_numerator(denominator, taps)
        return CompanionForm(per_filter(denominator, len(taps)), numerator, taps[:, 0])

    def _constrained(self) -> torch.Tensor:
        """The denominators `(Q, N)` after the constraint, which scales them in float64."""
        if self.constraint is None:
            return self.denominator
        dtype = float64_or_widest(self.denominator.device)

        def constrained(a, s):
            return CONSTRAINTS[self.constraint](a.to(dtype), s.to(dtype))

        if is_transformed() or is_exported():  # neither torch.func nor torch.export has checkpoints
            return constrained(self.denominator, self.slack)
        # Computed again in the backward pass: at high orders its saved tensors would exceed all others.
        return checkpoint(constrained, self.denominator, self.slack, use_reentrant=False, preserve_rng_state=False)

    def _taps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The constrained denominators `(Q, N)` and the taps of the transform `(D, F)`, h_0 included, in float64."""
        dtype = float64_or_widest(self.numerator.device)
        denominator = self._constrained().to(dtype)
        taps = rational_kernel(denominator, self.numerator.to(dtype), self.size)
        first = taps[:, :1] + self.direct.to(dtype)[:, None]
        return denominator, torch.cat([first, taps[:, 1:]], dim=1)

    def _kernel(self, length: int) -> torch.Tensor:
        denominator, taps = self._taps()
        if not is_exported() and length <= self.size:
            return taps[:, :length]  # (D, L)
        # One graph cannot record the iteration of `extend_kernel`: its number of steps depends on the length.
        return (kernel_of_any_length if is_traced() else extend_kernel)(denominator, taps, length)  # (D, L)
