"""Compute a causal kernel of exact first taps and a sum of exponentials, and decode with it. See `to_recurrent`.

    t_j = head_j,                                   j < w
    t_j = Re sum_q r_q lambda_q^(j - w),            j >= w,        lambda_q = exp(-exp(nu_q) + i theta_q)         (1)
    s_C = sum_{p < C} lambda^(C-1-p) v_p,    its part of y_t:  Re sum_q r_q lambda_q^(t-C+1-w) s_C,q              (2)

B batch, D channels, L length, w window, Q modes, C tokens covered by the memory s, T tokens seen.

All channels share the poles lambda, which lie inside the unit circle for all values of the parameters; operators of
`tno_s4d.py` have poles of each channel, and decode in the same way with the window 1. (2) is a diagonal recurrence,
advanced a block of tokens at a time. At the start of a block, one product with powers of the poles adds the inputs
that are old enough to the memory s, and (2) gives its part in the outputs of the block. The younger inputs, in the
history, add their part through the first taps, as in `FilterRecurrence`. The memory stays w + 64 tokens behind, so
that the newest tokens can be removed.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .configuration_tnn import DIRECTIONS
from .history import HistoryBuffer, slack_after
from .numerics import compute_dtype, float64_or_widest, is_on_host
from .recurrence import LONG_PROMPT, PIECE, Counters, DecodingState, FilterRecurrence, Prompt
from .tno import ToeplitzOperator, require_causal
from .toeplitz import Pair, fit_taps

BLOCK = 32


class Poles(NamedTuple):
    """The poles exp(-rate + i angle) of filters, `(D, Q)` each."""

    rate: torch.Tensor
    angle: torch.Tensor

    def powers(self, exponents: torch.Tensor) -> Pair:
        """The powers with the exponents `(M,)`, `(D, M, Q)`."""
        exponents = exponents.to(self.rate.dtype)[:, None]  # (M, 1)
        radius, turn = torch.exp(-self.rate[:, None] * exponents), self.angle[:, None] * exponents  # (D, M, Q)
        return Pair(radius * turn.cos(), radius * turn.sin())


class ModalRecurrence(FilterRecurrence):
    """Decode a `ModesOperator` with a state whose size does not depend on the length of the sequence.

    Tokens are read and written S at a time: of poles of each filter, the powers of many would take too much memory.
    """

    _aged: tuple[int, torch.Tensor] = (-1, None)  # most blocks begin at the same age

    def __init__(self, operator):
        super().__init__(operator, None, operator.refill_phase)
        self.horizon = self.base = BLOCK
        self.first_block = BLOCK - int(operator.refill_phase * BLOCK)
        self.window, self.span = operator.window, PIECE if operator.shares_poles else BLOCK

    @cached_property
    def _table(self) -> torch.Tensor:
        """The powers lambda^0 .. lambda^S, real parts before imaginary ones, `(D, S + 1, 2Q)`."""
        like = next(self.operator.parameters())
        powers = self.operator.modes()[0].powers(torch.arange(self.span + 1, device=like.device))
        return torch.cat(powers, dim=-1).to(compute_dtype(like.dtype))

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        return prompt.length > LONG_PROMPT

    def prefill(self, state: DecodingState, prompt: Prompt):
        modes, behind = self.operator.num_modes, self.window + slack_after(prompt.length)
        seen = prompt.length - self._needed(prompt)
        state.counters, waiting = Counters(block=self.first_block, covered=seen), None
        for piece in prompt.last(self._needed(prompt)).pieces(PIECE):
            x = self.channel_major(piece.inputs())  # (B, D, S)
            if waiting is None:
                waiting = x[..., :0]
                state.tensors["memory"] = x.new_zeros(*x.shape[:2], modes, dtype=x.dtype.to_complex())  # (B, D, Q)
            waiting, seen = torch.cat([waiting, x], dim=-1), seen + x.shape[-1]
            self.advance_memory(state, waiting, seen - behind)
            waiting = waiting[..., waiting.shape[-1] - seen + state.counters.covered :]  # not covered, (B, D, P)
        state.history = HistoryBuffer(waiting, self.window + BLOCK)

    def _needed(self, prompt: Prompt) -> int:
        """The number of newest inputs that the state depends on: until the slowest mode has faded."""
        if not is_on_host(prompt.v):  # reading its rate would be a device sync
            return prompt.length
        resolution = torch.finfo(compute_dtype(prompt.v.dtype)).eps
        slowest = self.operator.modes()[0].rate.min().clamp(min=0).abs()  # not -0, whose inverse is -inf
        faded = (-math.log(resolution) / slowest).item()  # inf for a rate of 0
        return int(min(prompt.length, faded + self.window + slack_after(prompt.length) + 1))

    def chunk(self, state: DecodingState, x: torch.Tensor) -> torch.Tensor:
        past = self.past(state)  # (B, D, P)
        y = self._continue(torch.cat([past, x], dim=-1), past.shape[-1], x.shape[-1])  # (B, D, L)
        y = y + self._from_memory(state, x.shape[-1])
        behind = self.window + slack_after(x.shape[-1])
        self.advance_memory(state, torch.cat([past, x], dim=-1), state.length + x.shape[-1] - behind)
        state.history.append(x)
        state.tensors.pop("future", None)
        return y

    def max_crop(self, state: DecodingState) -> int:
        covered = state.counters.covered
        return state.length - covered - self.window if covered else state.length

    def reach(self, state: DecodingState) -> int:
        """The number of inputs that the memory does not cover."""
        return state.length - state.counters.covered

    def fill(self, state: DecodingState, like: torch.Tensor):
        longest = self.window + state.history.slack
        self.advance_memory(state, self.past(state), state.length - longest)
        past = self.past(state)
        start = max(longest, past.shape[-1])  # one transform length for most fills
        near = self._continue(past, start, BLOCK, keep=start == longest)
        state.tensors["future"] = near + self._from_memory(state, BLOCK)
        state.counters.position = 0

    def advance_memory(self, state: DecodingState, waiting: torch.Tensor, until: int):
        """Add the tokens before `until` to the memory. `waiting` `(B, D, P)` begins with the first one not covered."""
        count, size = until - state.counters.covered, self.span
        if count <= 0:
            return
        table, memory, rest = self._table, state.tensors["memory"], count % size
        parts = waiting[..., :count].split([count - rest, rest], dim=-1)
        most = max(1, PIECE // size) * size
        for piece in (one for part in parts if part.shape[-1] for one in part.split(most, dim=-1)):
            length = min(size, piece.shape[-1])
            blocks = piece.unflatten(-1, (-1, length)).flip(-1)  # (B, D, I, S)
            added = torch.einsum("bdin,dnq->bdiq", blocks, table[:, :length])  # (B, D, I, 2Q)
            fading = complex_of(table[:, length])  # (D, Q)
            for one in complex_of(added).unbind(2):
                memory = memory * fading + one
        state.tensors["memory"] = memory
        state.counters.covered = until

    def _from_memory(self, state: DecodingState, count: int) -> torch.Tensor:
        """The part of the memory in the next `count` outputs, `(B, D, count)`."""
        memory = state.tensors["memory"]
        # The exponent in (2) for the next output; any number while the memory covers no token, and is 0.
        age = max(0, state.length - state.counters.covered + 1 - self.window)
        if self._aged[0] != age:
            self._aged = age, self.operator.complex_residues(age).to(memory.dtype)  # (D, Q)
        table, weights, parts = self._table, memory * self._aged[1], []
        for start in range(0, count, self.span):
            length = min(self.span, count - start)
            both = torch.cat([weights.real, -weights.imag], dim=-1)  # (B, D, 2Q)
            parts.append(torch.einsum("bdq,dnq->bdn", both, table[:, :length]))
            weights = weights * complex_of(table[:, -1])
        return torch.cat(parts, dim=-1)


def complex_of(parts: torch.Tensor) -> torch.Tensor:
    """Complex numbers `(..., Q)` from their real parts and, after them, their imaginary parts, `(..., 2Q)`."""
    return torch.complex(*parts.chunk(2, dim=-1))


class ModesOperator(ToeplitzOperator):
    """An operator whose taps from lag w = `window` on are sums of exponentials, Re sum_q r_q lambda_q^(j - w)."""

    is_recurrence = True
    shares_poles = False  # whether all filters have the same poles
    exponent = 0  # of the poles in the weights that `modes` returns, at lag w
    window: int
    num_modes: int

    def modes(self) -> tuple[Poles, Pair]:
        """The poles and the weights, `(D, Q)` each in float64; poles that all filters share are `(1, Q)`."""
        raise NotImplementedError

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """The powers lambda_q^n for the exponents `(M,)`, complex `(D, Q, M)`, in float64; of shared poles D is 1."""
        return torch.complex(*self.modes()[0].powers(exponents)).mT

    def complex_residues(self, age: int = 0) -> torch.Tensor:
        """The weights r lambda^age of a memory in the output of this age, see (2), complex `(D, Q)`."""
        poles, weights = self.modes()
        power = poles.powers(torch.tensor([age + self.exponent], device=poles.rate.device))  # (D, 1, Q)
        return torch.complex(*weights.times(Pair(*(part[:, 0] for part in power))))

    def recurrence(self) -> ModalRecurrence:
        require_causal(self)
        return ModalRecurrence(self)


class ModalOperator(ModesOperator):
    """The operator of first taps and complex exponentials, equation (1). Causal only."""

    supports_causal, supports_bidirectional = DIRECTIONS["modal"]
    # In bfloat16 phases are wrong after a few lags, and the residues of a fit do not cancel.
    fp32_parameters = ("head", "residues", "log_rate", "angle")
    shares_poles = True
    channel_parameters = {"head": 1, "residues": 1}

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.window, self.num_modes = config.modal_window, config.num_modes
        self.head = nn.Parameter(torch.empty(self.channels, config.modal_window))
        self.residues = nn.Parameter(torch.empty(self.channels, config.num_modes, 2))
        self.log_rate = nn.Parameter(torch.empty(config.num_modes))
        self.angle = nn.Parameter(torch.empty(config.num_modes))

    def reset_parameters(self):
        init.normal_(self.head, std=self.window**-0.5)
        init.normal_(self.residues, std=self.num_modes**-0.5)
        init.uniform_(self.log_rate, -6.0, 0.0)
        init.uniform_(self.angle, 0.0, torch.pi)
        if self.slow_start:
            self.start_slowly()

    def start_slowly(self):
        """Begin with one exponential for each channel, of as many time constants as there are modes."""
        constants = self.time_constants(self.num_modes).to(self.head)  # (Q,)
        own = torch.arange(self.channels, device=self.head.device) * self.num_modes // self.channels  # (D,)
        one = nn.functional.one_hot(own, self.num_modes).to(self.head)  # (D, Q)
        lags = torch.arange(self.window + 1, device=self.head.device)
        taps = torch.exp(-lags / constants[own, None])  # (D, w + 1)
        init.copy_(self.head, taps[:, :-1])
        init.copy_(self.residues, torch.stack([one * taps[:, -1:], torch.zeros_like(one)], dim=-1))
        init.copy_(self.log_rate, -constants.log())
        init.zeros_(self.angle)

    def modes(self) -> tuple[Poles, Pair]:
        dtype = float64_or_widest(self.angle.device)
        poles = Poles(self.log_rate.to(dtype).exp()[None], self.angle.to(dtype)[None])
        return poles, Pair(*self.residues.to(dtype).unbind(-1))

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        position = torch.arange(length, device=self.head.device)
        poles, weights = self.modes()
        powers = poles.powers((position - self.window).clamp(min=0))  # (1, L, Q)
        tail = weights.real @ powers.real[0].t() - weights.imag @ powers.imag[0].t()  # (D, L)
        head = self.head.to(compute_dtype(self.head.dtype))  # (D, w)
        # No branch on the length, of which an exported graph would keep one side.
        taps = torch.where(position < self.window, fit_taps(head, length), tail.to(head.dtype))
        return taps.to(device or taps.device)
