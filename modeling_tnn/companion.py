"""Decoding of a rational transfer function by the companion form of its recurrence (RTF paper, section 3.3).

    w_t = u_t - sum_i a_i w_{t-i},    y_t = k_0 u_t + sum_i c_i w_{t-i},    i = 1 .. N                            (1)

B batch, D channels, L length of a chunk, N order, H = `BLOCK` tokens of a block.

c and k_0 are the exact ones of `rational.py`. The state is the last N values of w in float64; a token costs O(N). A
chunk of L tokens costs O(L log L): the old values of w contribute e_t = -sum_{i>t} a_i w_{t-i} to (1), which ends
after N tokens. Then w = g * (u + e), where g is the power series of 1/a(z), and y follows from w by a filter of N
taps.

For many texts on the CPU, to read the states takes longer than to read the weights. So they are read once for H
tokens: at the start of a block, one product with shifted copies of a and c gives what the values before it add to both
sums of (1) at all tokens of the block (the future). Each token then adds its own value to the future of the rest.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .history import HistoryBuffer, places, slack_after
from .numerics import compute_dtype, float64_or_widest, is_on_host
from .rational import companion_matrix, monic, reciprocal_series
from .recurrence import LONG_PROMPT, PIECE, DivergenceError, Recurrence, shared_values
from .toeplitz import causal_toeplitz_matmul, fit_taps

# Largest growth of g over the trained length. float64 then still has more correct digits than float32 needs.
LARGEST_GROWTH = 1e6

# From so many texts on, a step on the CPU is faster as a product of matrices.
BATCH = 4

# Tokens of such a step's block.
BLOCK = 8

# Tokens between two looks for values that are not finite, on an accelerator.
PATROL = 64


class CompanionForm(NamedTuple):
    """The coefficients of (1) for each channel: a, c and k_0."""

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
            newest = self._filter(x, w[..., -self.order :], series[:, : x.shape[-1]])
            self._check_finite(newest)
            w = torch.cat([w, newest], dim=-1)[..., -kept:]
        state.history = HistoryBuffer(w, self.order)

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= BATCH and is_on_host(x):
            y, newest = self._next_of_many(state, x)
        else:
            end_block(state)
            y, newest = self._next(state.history.last(self.order), x, *self.constants(x))
        # A value that is not finite makes all later ones so. An accelerator would wait at each look.
        if is_on_host(newest) or state.length % PATROL == 0:
            self._check_finite(newest)
        state.history.append(newest)
        return y

    def make_ready(self, state, like: torch.Tensor):
        """Look at the newest value, as `step` does."""
        end_block(state)
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

    def _next_of_many(self, state, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`_next` for many texts, by blocks of tokens."""
        position = state.counters["position"] if "future" in state.tensors else BLOCK
        if position == BLOCK:
            past = state.history.last(self.order).permute(1, 2, 0)  # (D, N, B)
            future = torch.bmm(self._shifted, past).unflatten(1, (BLOCK, 2))  # (D, H, 2, B)
            state.tensors["future"], position = future.permute(3, 1, 2, 0).contiguous(), 0  # (B, H, 2, D)
        future, now = state.tensors["future"], x[..., 0]
        y, echo = future[:, position].unbind(1)  # (B, D) each
        newest = now - echo
        left = BLOCK - position - 1
        future[:, position + 1 :].addcmul_(newest[:, None, None], self._first[:left])
        state.counters["position"] = position + 1
        return (self._form.direct * now + y)[..., None], newest[..., None]

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = state.history.last(self.order)
        w = self._filter(x, past)  # (B, D, L)
        self._check_finite(w)
        y = self._read(x, past, w)
        state.history.append(w)
        end_block(state)
        return y

    def max_crop(self, state) -> int:
        return min(state.length, state.history.held - self.order)

    def crop(self, state, count: int):
        state.history.drop(count)
        end_block(state)

    def put(self, state, other, rows: list[int]):
        for one in (state, other):
            end_block(one)  # a new block begins for all
        state.history.put(other.history, rows, shared_values(state, other, extra=self.order))

    def compact(self, state):
        state.history.compact(state.length + self.order)

    def bytes_per_channel(self, tokens: int, dtype: torch.dtype) -> int:
        return (places(self.order, tokens) + 2 * BLOCK) * float64_or_widest(self.operator.numerator.device).itemsize

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
    def _shifted(self) -> torch.Tensor:
        """The coefficients of the values before a block, for both sums of (1) at each of its tokens, `(D, 2H, N)`."""
        shifted = [pad(self._both, (j, 0))[..., : self.order] for j in range(BLOCK)]
        return torch.stack(shifted, dim=1).flatten(1, 2)

    @cached_property
    def _first(self) -> torch.Tensor:
        """The coefficients c_i and a_i of the lags i = 1 .. H - 1, `(H-1, 2, D)`."""
        first = fit_taps(self._both.flip(2).flatten(0, 1), BLOCK - 1)  # (2D, H-1)
        return first.unflatten(0, (-1, 2)).permute(2, 1, 0).contiguous()

    @cached_property
    def _stable(self) -> bool:
        return is_contracting(self._denominator)

    def _filter(self, x: torch.Tensor, past: torch.Tensor, series: torch.Tensor | None = None) -> torch.Tensor:
        """The values w of (1) for the inputs `x` `(B, D, L)`, after the earlier values `past` `(B, D, N)`.

        `series` `(D, L)` is g, which is computed if it is not given.
        """
        order, length, implementation = self.order, x.shape[-1], self.operator.implementation
        taps = monic(self._denominator)  # (D, N+1)
        after = pad(past, (0, order)).transpose(1, 2)  # (B, 2N, D)
        echoed = causal_toeplitz_matmul(after, taps, implementation)[:, order:]  # (B, N, D): -e
        driven = x - pad(echoed.transpose(1, 2), (0, length - order))  # (B, D, L)
        series = reciprocal_series(self._denominator, length) if series is None else series  # (D, L)
        return causal_toeplitz_matmul(driven.transpose(1, 2), series, implementation).transpose(1, 2)

    def _read(self, x: torch.Tensor, past: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The outputs y of (1) for the inputs `x` and the values `w`, `(B, D, L)` each, after `past` `(B, D, N)`."""
        whole = torch.cat([past, w], dim=-1).transpose(1, 2)  # (B, N+L, D)
        taps = pad(self._form.numerator, (1, 0))  # (D, N+1)
        y = causal_toeplitz_matmul(whole, taps, self.operator.implementation)[:, self.order :]  # (B, L, D)
        return y.transpose(1, 2) + self._form.direct[:, None] * x

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
            f"diverge {where}. Generate with use_cache=False (`tnn generate --use_cache false`), or train with "
            f"rtf_constraint='l1_montel' (`--config_overrides rtf_constraint=l1_montel`)."
        )


def end_block(state):
    """Forget the future of a block: the next step of many texts begins another one."""
    state.tensors.pop("future", None)
    state.counters.pop("position", None)


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
