"""Compute the impulse responses of rational transfer functions, and decode with them (RTF paper).

    H(z) = h_0 + b(z)/a(z),  b(z) = b_1 z^-1 + .. + b_N z^-N,  a(z) = 1 + a_1 z^-1 + .. + a_N z^-N           (1)
    c_i = k_i + a_1 k_{i-1} + .. + a_{i-1} k_1                                                              (2)
    k_t = sum_{i=1}^{N} c_i g_{t-i},    g the power series of 1/a(z)                                        (3)
    w_t = u_t - sum_i a_i w_{t-i},    y_t = k_0 u_t + sum_i c_i w_{t-i},    i = 1 .. N                       (4)

B batch, D channels or filters, Q denominators (D, or fewer shared by groups of D/Q consecutive filters), N order,
L length, F transform length (`rtf_truncation_length`, or one more if it is odd), H = `BLOCK` tokens of a block.

Taps (paper, sections 3.1 to 3.3). Sampling (1) at the F-th roots of unity and transforming back yields F taps k whose
tails have wrapped around: tap t is the sum of the impulse response at t, t + F, t + 2F, ... Training fits those taps,
as the released code does, here in float64: for poles near the unit circle float32 loses all digits. The filter with
exactly these taps and no wrapping has the same denominator; its numerator c (2) follows from K(z) a(z) = c(z). It is
the c of b = c (I - A^F), A the companion matrix (equation 13), without forming A^F. Since lag F folds onto lag 0, its
direct term is the tap k_0, not h_0. Beyond F the taps are (3). A bidirectional operator has a second filter for
negative lags, t_{-k} = its tap k - 1 (its h_0 is the tap of lag -1).

Decoding by (4). The state is the last N values of w in float64; a token costs O(N), a chunk O(L log L): the old values
of w contribute e_t = -sum_{i>t} a_i w_{t-i}, which ends after N tokens, and w = g * (u + e). Many states take longer
to read than the weights. So on the CPU they are read once for H tokens: at the start of a block, one product gives the
part of the values before it in both sums of (4) at all its tokens (the future). Each token adds its own value there.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from .history import HistoryBuffer, slack_after
from .numerics import (
    compute_dtype,
    float64_or_widest,
    is_exported,
    is_exported_to_onnx,
    is_fused,
    is_on_host,
    is_traced,
    is_transformed,
    must_be_eager,
    next_fast_len,
)
from .recurrence import LONG_PROMPT, PIECE, DecodingState, DivergenceError, Prompt, Recurrence
from .tno import ToeplitzOperator, require_causal
from .toeplitz import causal_toeplitz_matmul, exported_quotient, fit_taps
from .toeplitz_fused import CHUNK, differentiable_gradients, must_differentiate

LARGE_CHUNK = 2**25  # numbers in a chunk of filters on an accelerator
LARGEST_GROWTH = 1e6  # of g over the trained length: float64 then has more correct digits than float32 needs
LARGEST_RISE = 1e4  # of a kernel beyond its trained length: float32 then has digits left for the first outputs
STEPS, MANY_STEPS = 32, 128  # of a recursion in a block, for many denominators and for up to 16
BATCH, BLOCK = 4, 8  # sequences from which a step on the CPU is faster by blocks, and tokens in a block
CHECK_EVERY = 64  # tokens between two checks for values that are not finite, on an accelerator


def rational_kernel(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The taps of (1) without h_0: a `(Q, N)` and b `(D, N)` to `(D, F)`, for an even F = `size` above N."""
    above, below = pad(numerator, (1, 0)), monic(denominator)  # (D, N+1), (Q, N+1)
    if is_exported():  # exporters that transform in the runtime cannot repeat complex numbers
        below = per_filter(below, len(numerator))  # (D, N+1)
    if is_exported_to_onnx():
        return exported_quotient(above, below, size, size)
    above, below = torch.fft.rfft(above, n=size), torch.fft.rfft(below, n=size)  # (D, F/2+1), (Q or D, F/2+1)
    return torch.fft.irfft(above / per_filter(below, len(numerator)), n=size)


class RationalTaps(torch.autograd.Function):
    """The first L <= F taps of (1), h_0 included, for a few filters at a time. Only the inputs are saved.

    With A and B the transforms of denominator and numerator, k = irfft(B / A), and for a gradient g of the taps

        gradient of b = irfft(rfft(g) conj(1 / A)),    gradient of a = -irfft(rfft(g) conj(B / A^2))

    both at 1 .. N, in the dtype `work`. Autograd computes higher derivatives from `rational_kernel`.
    """

    @staticmethod
    def forward(ctx, denominator, numerator, direct, size: int, length: int, work: torch.dtype) -> torch.Tensor:
        """`(Q, N)`, `(D, N)` and `(D,)` to `(D, L)` in the dtype of `numerator`, but at least float32."""
        ctx.save_for_backward(denominator, numerator)
        ctx.size, ctx.work = size, work
        taps = numerator.new_empty(len(numerator), length, dtype=torch.promote_types(numerator.dtype, torch.float32))
        for chosen, below, above in spectra(denominator, numerator, size, work):
            taps[chosen] = torch.fft.irfft(above.div_(below), n=size)[:, :length]
        taps[:, 0] += direct
        return taps

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        denominator, numerator = ctx.saved_tensors
        order, group, size, work = numerator.shape[1], len(numerator) // len(denominator), ctx.size, ctx.work
        if must_differentiate(gradient):

            def taps(a, b):
                return rational_kernel(a.to(work), b.to(work), size)[:, : gradient.shape[1]].to(gradient.dtype)

            found = differentiable_gradients(taps, (denominator, numerator), ctx.needs_input_grad, gradient)
            return *found, gradient[:, 0], None, None, None
        a_gradient, b_gradient = torch.zeros_like(denominator, dtype=work), torch.empty_like(numerator)
        for chosen, below, above in spectra(denominator, numerator, size, work):
            g = torch.fft.rfft(gradient[chosen].to(work), n=size).div_(below.conj())  # (C, F/2+1)
            b_gradient[chosen] = torch.fft.irfft(g, n=size)[:, 1 : order + 1]
            parts = torch.fft.irfft(g.mul_(above.div_(below).conj()), n=size)[:, 1 : order + 1]  # (C, N)
            owner = torch.arange(chosen.start, chosen.stop, device=parts.device) // group
            a_gradient.index_add_(0, owner, parts, alpha=-1)
        return a_gradient.to(denominator.dtype), b_gradient, gradient[:, 0], None, None, None


def spectra(denominator: torch.Tensor, numerator: torch.Tensor, size: int, work: torch.dtype) -> Iterator[tuple]:
    """Slices of a few filters, each with the transforms of their denominators and numerators, `(C, F/2 + 1)` each."""
    filters, group = len(numerator), len(numerator) // len(denominator)
    step = max(1, (CHUNK if is_on_host(numerator) else LARGE_CHUNK) // size)
    for start in range(0, filters, step):
        stop, first = min(start + step, filters), start // group
        below = torch.fft.rfft(monic(denominator[first : (stop - 1) // group + 1].to(work)), n=size)
        if group > 1:
            below = below[torch.arange(start, stop, device=below.device) // group - first]
        yield slice(start, stop), below, torch.fft.rfft(pad(numerator[start:stop].to(work), (1, 0)), n=size)


def companion_matrix(denominator: torch.Tensor) -> torch.Tensor:
    """The companion matrices `(Q, N, N)`, whose eigenvalues are the roots of denominators `(Q, N)`."""
    companion = torch.diag_embed(torch.ones_like(denominator[:, 1:]), offset=-1)
    companion[:, 0] = -denominator
    return companion


def spectral_radius(denominator: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a root of each denominator `(Q, N)`, `(Q,)` in float64; inf if not finite."""
    finite = denominator.isfinite().all(dim=1)
    matrices = companion_matrix(denominator.double().where(finite[:, None], 0.0))  # (Q, N, N)
    return torch.linalg.eigvals(matrices).abs().amax(dim=1).where(finite, torch.inf)


def monic(denominator: torch.Tensor) -> torch.Tensor:
    """The series 1, a_1 .. a_N: `(Q, N)` to `(Q, N + 1)`."""
    return pad(denominator, (1, 0), value=1.0)


def per_filter(values: torch.Tensor, filters: int) -> torch.Tensor:
    """The values of each filter, `(Q, ...)` to `(D, ...)`."""
    return values if filters == len(values) else values.repeat_interleave(filters // len(values), dim=0)


def solve_recursion(denominator: torch.Tensor, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
    """The filter y = x / a: y_t = x_t - sum_i a_i y_{t-i}, for `(Q, N)` and `(Q, L, G)` to `(Q, L, G)`.

    It begins after `past` values `(Q, N, G)`, and takes blocks by substitution with triangular matrices. Its errors
    are those of the plain recursion. A transform, or a power of the companion matrix, rounds relative to the largest
    value, and the sums that follow magnify that: a stable filter with poles near each other may diverge.
    """
    order, size = denominator.shape[1], min(MANY_STEPS if len(denominator) <= 16 else STEPS, x.shape[1])
    lags = pad(monic(denominator), (size - 1, size - 1)).flip(1)  # from lag N + S - 1 to 1 - S
    before, within = lags.unfold(1, order + size, 1).flip(1).split([order, size], dim=2)  # (Q, S, N), (Q, S, S)
    within = within.mT.contiguous().mT  # as the solver wants it
    past, blocks = x.new_zeros(len(x), order, x.shape[2]) if past is None else past, []
    for part in x.split(size, dim=1):
        rows = part.shape[1]
        driven = part - before[:, :rows] @ past
        blocks.append(torch.linalg.solve_triangular(within[:, :rows, :rows], driven, upper=False, unitriangular=True))
        past = torch.cat([past, blocks[-1]], dim=1)[:, -order:]
    return torch.cat(blocks, dim=1)


def reciprocal_series(denominator: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` coefficients of 1/a(z), `(Q, N)` to `(Q, length)`."""
    one = pad(torch.ones_like(denominator[:, :1]), (0, length - 1))
    return solve_recursion(denominator, one[..., None])[..., 0]


def recurrence_numerator(denominator: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """The numerator c `(D, N)` of the filter with the taps `(D, F)`, by equation (2). Only taps 1 .. N are read."""
    order = denominator.shape[1]
    below, later = per_filter(monic(denominator), len(taps)), taps[:, 1 : order + 1]
    return causal_toeplitz_matmul(later.t()[None], below[:, :order], "eager")[0].t()


def extend_kernel(denominator: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """The taps `(D, F)` continued to `(D, length)` by equation (3)."""
    numerator = recurrence_numerator(denominator, taps).unflatten(0, (len(denominator), -1))  # (Q, D/Q, N)
    driven = pad(numerator, (0, length - 1))[..., : length - 1].transpose(1, 2)  # (Q, L-1, D/Q)
    beyond = solve_recursion(denominator, driven)[:, taps.shape[1] - 1 :].transpose(1, 2).flatten(0, 1)  # F .. L-1
    return torch.cat([taps, beyond], dim=1)


def kernel_of_any_length(denominator: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """The taps `(D, F)` cut or continued to `(D, length)` without a branch on the length, for torch.export.

    Beyond F the series of c(z)/a(z) is sampled at M points like (1), but on a circle of radius r > 1: taps become
    k_t r^-t. With M > 3L and r^M = 1 / eps the wrapped tail vanishes, and the multiplication by r^t increases rounding
    errors by at most eps^(-1/3), to 1e-11 of the largest tap in float64 (Abate and Whitt, 1992).
    """
    order, count = denominator.shape[1], taps.shape[1]
    size = next_fast_len(3 * length + order)  # M
    position = torch.arange(length, device=taps.device)
    fading = torch.finfo(taps.dtype).eps ** (position.to(taps.dtype) / size)  # (L,): r^-t
    scale = torch.finfo(taps.dtype).eps ** (torch.arange(1, order + 1, device=taps.device, dtype=taps.dtype) / size)
    numerator = recurrence_numerator(denominator, taps)
    below = per_filter(monic(denominator * scale), len(taps))  # (D, N+1)
    beyond = exported_quotient(pad(numerator * scale, (1, 0)), below, size, length) / fading  # (D, L)
    return torch.where(position < count, fit_taps(taps, length), beyond)


class CompanionForm(NamedTuple):
    """The coefficients of (4) for each channel: a, c and k_0."""

    denominator: torch.Tensor  # (D, N)
    numerator: torch.Tensor  # (D, N)
    direct: torch.Tensor  # (D,)


class CompanionRecurrence(Recurrence):
    """Decode an `RtfOperator`. Poles outside the unit circle that make it inexact or infinite: a DivergenceError."""

    def __init__(self, operator):
        super().__init__(operator)
        self.order = operator.numerator.shape[1]

    def state_dtype(self, v: torch.Tensor) -> torch.dtype:
        return float64_or_widest(v.device)

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        return prompt.length > LONG_PROMPT and not prompt.v.is_meta  # no values there to check the poles by

    def prefill(self, state: DecodingState, prompt: Prompt):
        kept = self.order + slack_after(prompt.length)
        denominator = self._form.denominator
        series = reciprocal_series(denominator, min(PIECE, prompt.length))  # (D, S)
        # Terms of g beyond `series` may add less than the resolution of the outputs. On an accelerator the device sync
        # for this bound takes longer than reading the whole prompt.
        resolution = torch.finfo(compute_dtype(prompt.v.dtype)).eps
        if is_on_host(series) and later_bound(denominator, series) * prompt.length < resolution:
            prompt = prompt.last(series.shape[1] + kept)
        w = series.new_zeros(len(prompt.v) * self.operator.group_size, len(series), self.order)  # (B, D, N)
        for piece in prompt.pieces(PIECE):
            x = self.channel_major(piece.inputs())  # (B, D, S)
            newest = self._filter(x, w[..., -self.order :], series[:, : x.shape[-1]])
            self.check_finite(newest)
            w = torch.cat([w, newest], dim=-1)[..., -kept:]
        state.history = HistoryBuffer(w, self.order)

    def step(self, state: DecodingState, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= BATCH and is_on_host(x):
            y, newest = self._next_of_many(state, x)
        else:
            end_block(state)
            y, newest = self.next_value(state.history.last(self.order), x, *self.coefficients)
        # A value that is not finite makes all later ones so. On an accelerator each check is a device sync.
        if is_on_host(newest) or state.length % CHECK_EVERY == 0:
            self.check_finite(newest)
        state.history.append(newest)
        return y

    def next_value(self, past, x, denominator, numerator, direct) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the value w for one input, `(B, D, 1)` each, after the values `past` `(B, D, N)`."""
        now = x[..., 0]  # (B, D)
        y = direct * now + torch.linalg.vecdot(past, numerator)
        newest = now - torch.linalg.vecdot(past, denominator)
        return y[..., None], newest[..., None]

    def _next_of_many(self, state: DecodingState, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`next_value` for many sequences, by blocks of tokens."""
        position = state.counters.position if "future" in state.tensors else BLOCK
        if position == BLOCK:
            past = state.history.last(self.order).permute(1, 2, 0)  # (D, N, B)
            future = torch.bmm(self._block[0], past).unflatten(1, (BLOCK, 2))  # (D, H, 2, B)
            state.tensors["future"], position = future.permute(3, 1, 2, 0).contiguous(), 0  # (B, H, 2, D)
        future, now = state.tensors["future"], x[..., 0]
        y, echo = future[:, position].unbind(1)  # (B, D) each
        newest = now - echo
        future[:, position + 1 :].addcmul_(newest[:, None, None], self._block[1][: BLOCK - position - 1])
        state.counters.position = position + 1
        return (self._form.direct * now + y)[..., None], newest[..., None]

    def chunk(self, state: DecodingState, x: torch.Tensor) -> torch.Tensor:
        past = state.history.last(self.order)
        w = self._filter(x, past)  # (B, D, L)
        self.check_finite(w)
        whole = torch.cat([past, w], dim=-1).transpose(1, 2)  # (B, N+L, D)
        taps = pad(self._form.numerator, (1, 0))  # (D, N+1)
        y = causal_toeplitz_matmul(whole, taps, self.operator.implementation)[:, self.order :]  # (B, L, D)
        state.history.append(w)
        end_block(state)
        return y.transpose(1, 2) + self._form.direct[:, None] * x

    def max_crop(self, state: DecodingState) -> int:
        return min(state.length, state.history.held - self.order)

    def crop(self, state: DecodingState, count: int):
        state.history.drop(count)
        end_block(state)

    @cached_property
    def _form(self) -> CompanionForm:
        form = CompanionForm(*(part.detach() for part in self.operator.companion_form()))
        if not is_contracting(form.denominator):
            growth = reciprocal_series(form.denominator, self.operator.size).abs().amax(dim=1)  # (D,)
            self._refuse(form.denominator, ~(growth <= LARGEST_GROWTH))
        return form

    @cached_property
    def coefficients(self) -> tuple[torch.Tensor, ...]:
        """Coefficients that `next_value` reads: a and c for the lags N .. 1, `(D, N)` each, and k_0 `(D,)`."""
        *parts, direct = self._form
        return *(part.flip(1).contiguous() for part in parts), direct

    @cached_property
    def _block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients c and a of a block, for both sums of (4).

        `(D, 2H, N)` for the values before it at each of its tokens, and `(H-1, 2, D)` for the lags 1 .. H - 1.
        """
        denominator, numerator, _ = self.coefficients
        both = torch.stack([numerator, denominator], dim=1)  # (D, 2, N)
        shifted = [pad(both, (j, 0))[..., : self.order] for j in range(BLOCK)]
        first = fit_taps(both.flip(2).flatten(0, 1), BLOCK - 1).unflatten(0, (-1, 2))  # (D, 2, H-1)
        return torch.stack(shifted, dim=1).flatten(1, 2), first.permute(2, 1, 0).contiguous()

    @cached_property
    def _stable(self) -> bool:
        return is_contracting(self._form.denominator)

    def _filter(self, x: torch.Tensor, past: torch.Tensor, series: torch.Tensor | None = None) -> torch.Tensor:
        """The values w of (4) for the inputs `x` `(B, D, L)` after the values `past` `(B, D, N)`; `series` is g."""
        if not self._stable:  # a transform may lose all digits
            w = solve_recursion(self._form.denominator, x.permute(1, 2, 0), past.permute(1, 2, 0))
            return w.permute(2, 0, 1)
        order, length, implementation = self.order, x.shape[-1], self.operator.implementation
        taps = monic(self._form.denominator)  # (D, N+1)
        after = pad(past, (0, order)).transpose(1, 2)  # (B, 2N, D)
        echoed = causal_toeplitz_matmul(after, taps, implementation)[:, order:]  # (B, N, D): -e
        driven = x - pad(echoed.transpose(1, 2), (0, length - order))  # (B, D, L)
        series = reciprocal_series(self._form.denominator, length) if series is None else series  # (D, L)
        return causal_toeplitz_matmul(driven.transpose(1, 2), series, implementation).transpose(1, 2)

    def check_finite(self, w: torch.Tensor):
        """Raise a DivergenceError if values `w` `(B, D, L)` are not finite."""
        if not (self._stable or w.is_meta):
            self._refuse(self._form.denominator, ~torch.isfinite(w).all(2).all(0))

    def _refuse(self, denominator: torch.Tensor, diverging: torch.Tensor):
        """Raise a DivergenceError if one of the `diverging` channels `(D,)` has a pole outside the unit circle."""
        way = "Generate with use_cache=False"
        refuse_poles(self.operator, denominator, diverging, f"makes the recurrence diverge. {way}")


def refuse_poles(operator: "RtfOperator", denominator: torch.Tensor, growing: torch.Tensor, consequence: str):
    """Raise a DivergenceError for the first `growing` filter `(D,)` with a pole outside the unit circle, if any."""
    if not growing.any():
        return
    filters = growing.nonzero()[:, 0].cpu()
    outside = (radii := spectral_radius(denominator.detach().cpu()[filters])) > 1
    if outside.any():
        channel, radius = filters[outside][0].item() % operator.channels, radii[outside][0].item()
        raise DivergenceError(
            f"Layer {operator.layer_idx}, channel {channel}: a pole of radius {radius:.6f} {consequence}, or train "
            "with rtf_constraint='l1_montel'."
        )


def end_block(state: DecodingState):
    """Drop the future of a block: the next step of many sequences begins another one."""
    state.tensors.pop("future", None)
    state.counters.position = 0


def is_contracting(denominator: torch.Tensor) -> bool:
    """Whether sum|a_i| < 1 for all denominators `(D, N)`: all poles lie inside the unit circle, nothing diverges."""
    return denominator.is_meta or bool((denominator.abs().sum(1) < 1).all())


def later_bound(denominator: torch.Tensor, series: torch.Tensor) -> float:
    """A bound of g beyond `series` `(D, S)`, if it is below 1: its last N values echo in N inputs to g."""
    order = denominator.shape[1]
    last = series[:, -order:].abs().amax(1)  # (D,)
    return (order * last * denominator.abs().sum(1) * series.abs().amax(1)).max().item()


def l1_montel(denominator: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """Denominators `(Q, N)` in float64, scaled to sum|a_i| < 1: all poles lie inside the unit circle (section 3.4).

    The scaling is that of the paper's code, with slacks s `(A,)`; row i has the slack i mod A.
    """
    dtype = float64_or_widest(denominator.device)
    denominator, slack = denominator.to(dtype), slack.to(dtype).repeat(len(denominator) // len(slack))[:, None]
    return denominator / (denominator.abs().sum(-1, keepdim=True) + slack.abs() + 1e-6)


CONSTRAINTS = {None: lambda denominator, slack: denominator, "l1_montel": l1_montel}
INITIAL_BOUNDS = {"zeros": lambda order: 0.0, "xavier": lambda order: order**-0.5, "montel": lambda order: 1 / order}


class RtfOperator(ToeplitzOperator):
    """The operator of rational transfer functions."""

    fp32_parameters = ("denominator", "numerator", "direct", "slack")  # in bfloat16 poles would leave the circle
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
        self.channel_parameters = {"denominator": sides, "numerator": sides, "direct": sides, "slack": 1}

    def reset_parameters(self):
        init.uniform_(self.denominator, -self.initial_bound, self.initial_bound)
        init.uniform_(self.numerator, -self.initial_bound, self.initial_bound)
        init.ones_(self.direct)
        if self.slack is not None:
            init.uniform_(self.slack)
        if self.slow_start:
            self.start_slowly()

    def start_slowly(self):
        """Begin with one pole p = exp(-1 / time constant) for each denominator: k_t = p^t."""
        sides, rows = len(self.numerator) // self.channels, len(self.denominator)
        pole = torch.exp(-1 / self.time_constants(rows // sides)).to(self.denominator)  # (Q,)
        first = torch.arange(self.denominator.shape[1], device=pole.device) == 0  # (N,)
        # The constraint divides by the sum of the magnitudes and the slack.
        largest = pole if self.slack is None else torch.ones_like(pole)
        init.copy_(self.denominator, -largest.repeat(sides)[:, None] * first)
        if self.slack is not None:
            init.copy_(self.slack, 1 / pole - 1)
        rest = per_filter((1 - pole**self.size).repeat(sides), len(self.numerator))  # the tail wraps around
        init.copy_(self.numerator, (per_filter(pole.repeat(sides), len(rest)) * rest)[:, None] * first)
        init.copy_(self.direct, rest)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if is_fused(self.implementation) and length <= self.size:  # (D, L) or (2D, L)
            work = float64_or_widest(self.direct.device)
            kernel = RationalTaps.apply(self._constrained(), self.numerator, self.direct, self.size, length, work)
        else:
            denominator, kernel = self._taps()
            if not is_exported() and length <= self.size:
                kernel = kernel[:, :length]
            else:  # one graph cannot record the iteration of `extend_kernel`, whose number of steps depends on L
                kernel = (kernel_of_any_length if is_traced() else extend_kernel)(denominator, kernel, length)
            kernel = kernel.to(compute_dtype(self.numerator.dtype))
        kernel = kernel.to(device or kernel.device)
        if self.causal:
            return kernel
        positive, negative = kernel.chunk(2)  # (D, L) each
        # Not negative[:, : L - 1]: L - 1 may be 1, which torch.export would rule out.
        return torch.cat([negative.flip(1), positive], dim=1)[:, 1:]  # (D, 2L-1)

    def kernel_of(self, length: int, device: torch.device | None = None, as_taps: bool = False) -> torch.Tensor:
        """The coefficients, or a DivergenceError if poles make them rise so far that first outputs are rounding."""
        kernel = super().kernel_of(length, device, as_taps)
        if self.constraint is None and not must_be_eager() and length > self.size and not kernel.is_meta:
            sides = kernel.detach().abs()
            if not self.causal:
                sides = torch.cat([sides, sides.flip(1)])[:, length - 1 :]  # (2D, L)
            trained, beyond = (part.amax(dim=1) for part in sides.split([self.size, length - self.size], dim=1))
            way = f"makes the kernel grow beyond the trained length. Read at most {self.size} tokens at a time"
            denominators = per_filter(self._constrained(), len(sides))
            refuse_poles(self, denominators, ~(beyond <= LARGEST_RISE * trained), way)
        return kernel

    def recurrence(self) -> CompanionRecurrence:
        require_causal(self)
        return CompanionRecurrence(self)

    def denominators(self) -> torch.Tensor:
        """The denominator of each filter in float64, `(D, N)` (`(2D, N)` if bidirectional)."""
        dtype = float64_or_widest(self.numerator.device)
        return per_filter(self._constrained().to(dtype), len(self.numerator))

    def companion_form(self) -> CompanionForm:
        """The coefficients of the recurrence in float64. Its impulse response is exactly `coefficients`."""
        require_causal(self)
        denominator, taps = self._taps()
        return CompanionForm(per_filter(denominator, len(taps)), recurrence_numerator(denominator, taps), taps[:, 0])

    def _constrained(self) -> torch.Tensor:
        """The denominators `(Q, N)` after the constraint."""
        if self.constraint is None:
            return self.denominator
        constrained, given = CONSTRAINTS[self.constraint], (self.denominator, self.slack)
        if is_transformed() or is_exported():  # neither torch.func nor torch.export has checkpoints
            return constrained(*given)
        # Computed again in the backward pass: at high orders its saved tensors would exceed all others.
        return checkpoint(constrained, *given, use_reentrant=False, preserve_rng_state=False)

    def _taps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The constrained denominators `(Q, N)` and the taps of the transform `(D, F)`, h_0 included, in float64."""
        dtype = float64_or_widest(self.numerator.device)
        denominator = self._constrained().to(dtype)
        taps = rational_kernel(denominator, self.numerator.to(dtype), self.size)
        first = taps[:, :1] + self.direct.to(dtype)[:, None]
        return denominator, torch.cat([first, taps[:, 1:]], dim=1)
