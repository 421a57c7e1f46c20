"""Compute a causal kernel of exact first taps and a sum of exponentials, and decode with it. See `to_recurrent`.

    t_j = head_j,                                   j < w
    t_j = Re sum_q r_q lambda_q^(j - w),            j >= w,        lambda_q = exp(-exp(nu_q) + i theta_q)         (1)
    s_C = sum_{p < C} lambda^(C-1-p) v_p,    its part of y_t:  Re sum_q r_q lambda_q^(t-C+1-w) s_C,q              (2)

B batch, D channels, L length, w window, Q modes, C tokens covered by the memory s, T tokens seen.

All channels share the poles lambda, which lie inside the unit circle for all values of the parameters. (2) is a
diagonal recurrence, advanced a block of tokens at a time. At the start of a block, one product with powers of the
poles adds the inputs that are old enough to the memory s, and (2) gives its part in the outputs of the block. The
younger inputs, in the history, add their part through the first taps, as in `FilterRecurrence`. The memory stays
w + 64 tokens behind, so that the newest tokens can be removed.
"""

import math
from functools import cached_property

import torch
from torch import nn
from transformers import initialization as init

from .configuration_tnn import DIRECTIONS
from .history import HistoryBuffer, slack_after
from .numerics import compute_dtype, float64_or_widest, is_exported, is_on_host
from .recurrence import LONG_PROMPT, PIECE, Counters, DecodingState, FilterRecurrence, Prompt
from .tno import ToeplitzOperator
from .toeplitz import fit_taps

BLOCK = 32


class ModalRecurrence(FilterRecurrence):
    """Decode a `ModalOperator` with a state whose size does not depend on the length of the sequence."""

    def __init__(self, operator):
        super().__init__(operator, None, operator.refill_phase)
        self.horizon = self.base = BLOCK
        self.first_block = BLOCK - int(operator.refill_phase * BLOCK)
        self.window = operator.window

    @cached_property
    def _powers(self) -> dict[tuple[int, int], torch.Tensor]:
        """Results of `_power` by its arguments, for up to a block of exponents."""
        return {}

    @cached_property
    def _residues(self) -> torch.Tensor:
        """The residues r_q in the dtype of the memory, `(D, Q)`."""
        return self.operator.complex_residues().to(compute_dtype(self.operator.head.dtype).to_complex())

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        return prompt.length > LONG_PROMPT

    def prefill(self, state: DecodingState, prompt: Prompt):
        modes, behind = self.operator.num_modes, self.window + slack_after(prompt.length)
        seen = prompt.length - self._needed(prompt)
        state.counters = Counters(block=self.first_block, covered=seen)
        waiting = powers = None
        for piece in prompt.last(self._needed(prompt)).pieces(PIECE):
            x = self.channel_major(piece.inputs())  # (B, D, S)
            if waiting is None:
                waiting, powers = x[..., :0], self._powers_of_piece(x)
                state.tensors["memory"] = x.new_zeros(*x.shape[:2], modes, dtype=x.dtype.to_complex())  # (B, D, Q)
            waiting, seen = torch.cat([waiting, x], dim=-1), seen + x.shape[-1]
            self.advance_memory(state, waiting, seen - behind, powers)
            waiting = waiting[..., waiting.shape[-1] - seen + state.counters.covered :]  # not covered, (B, D, P)
        state.history = HistoryBuffer(waiting, self.window + BLOCK)

    def _needed(self, prompt: Prompt) -> int:
        """The number of newest inputs that the state depends on: until the slowest mode has faded."""
        if not is_on_host(prompt.v):  # reading its rate would be a device sync
            return prompt.length
        resolution = torch.finfo(compute_dtype(prompt.v.dtype)).eps
        faded = (-math.log(resolution) / self.operator.slowest_rate()).item()  # inf for a rate of 0
        return int(min(prompt.length, faded + self.window + slack_after(prompt.length) + 1))

    def _powers_of_piece(self, x: torch.Tensor) -> torch.Tensor | None:
        """The powers that all chunks of a prompt share, of which `x` is the first one."""
        return self._power(0, x.shape[-1])

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

    def advance_memory(self, state: DecodingState, waiting: torch.Tensor, until: int, powers=None):
        """Add the tokens before `until` to the memory. `waiting` `(B, D, P)` begins with the first one not covered.

        `powers` lambda^0, lambda^1, .. of the poles, `(Q, >= count)`, are computed if they are not given.
        """
        count = until - state.counters.covered
        if count <= 0:
            return
        powers = self._power(0, count) if powers is None else powers[:, :count]
        powers = powers.flip(1).t()  # (count, Q): lambda^(count-1) .. lambda^0
        inputs = waiting[..., :count]
        added = torch.complex(inputs @ powers.real, inputs @ powers.imag)  # (B, D, Q)
        faded = self._power(count, 1)[:, 0]  # (Q,)
        state.tensors["memory"] = state.tensors["memory"] * faded + added
        state.counters.covered = until

    def _from_memory(self, state: DecodingState, count: int) -> torch.Tensor:
        """The part of the memory in the next `count` outputs, `(B, D, count)`."""
        memory, powers = state.tensors["memory"], self._power(self._age(state), count)  # (B, D, Q), (Q, count)
        weighted = memory * self._residues  # (B, D, Q)
        return weighted.real @ powers.real - weighted.imag @ powers.imag

    def _age(self, state: DecodingState) -> int:
        """The exponent in (2) for the next output; any number while the memory covers no token, and is 0."""
        return max(0, state.length - state.counters.covered + 1 - self.window)

    def _power(self, first: int, count: int) -> torch.Tensor:
        """The powers lambda^first .. lambda^(first+count-1), complex `(Q, count)`."""
        powers = self._powers.get((first, count))
        if powers is None:
            exponents = torch.arange(first, first + count, device=self.operator.angle.device)
            powers = self.operator.powers(exponents).to(self._residues.dtype)
            if count <= BLOCK:
                self._powers[first, count] = powers
        return powers


class ModalOperator(ToeplitzOperator):
    """The operator of first taps and complex exponentials, equation (1). Causal only."""

    supports_causal, supports_bidirectional = DIRECTIONS["modal"]
    # In bfloat16 phases are wrong after a few lags, and the residues of a fit do not cancel.
    fp32_parameters = ("head", "residues", "log_rate", "angle")
    is_recurrence = True
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

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """The powers lambda_q^n for the exponents `(M,)`, complex `(Q, M)`, computed in float64."""
        dtype = float64_or_widest(self.angle.device)
        exponents = exponents.to(dtype)
        radius = torch.exp(-torch.exp(self.log_rate.to(dtype))[:, None] * exponents)  # (Q, M)
        return torch.polar(radius, self.angle.to(dtype)[:, None] * exponents)

    def slowest_rate(self) -> torch.Tensor:
        """The smallest exp(nu_q) of all modes, `()` in float64."""
        return self.log_rate.double().exp().min()

    def complex_residues(self) -> torch.Tensor:
        """The residues r_q of each channel, complex `(D, Q)`."""
        return torch.view_as_complex(self.residues.to(float64_or_widest(self.angle.device)).contiguous())

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if is_exported():
            return self._exported_coefficients(length).to(device or self.head.device)
        head = self.head[:, :length].to(compute_dtype(self.head.dtype))  # (D, <= w)
        beyond = torch.arange(max(0, length - self.window), device=head.device)
        tail = (self.complex_residues() @ self.powers(beyond)).real.to(head.dtype)  # (D, L - w)
        return torch.cat([head, tail], dim=1).to(device or head.device)

    def _exported_coefficients(self, length: int) -> torch.Tensor:
        """The `coefficients` without a branch on the length and without complex numbers, which ONNX lacks."""
        position = torch.arange(length, device=self.head.device)
        work = float64_or_widest(self.angle.device)
        age = (position - self.window).clamp(min=0).to(work)  # (L,)
        radius = torch.exp(-torch.exp(self.log_rate.to(work))[:, None] * age)  # (Q, L)
        turn = self.angle.to(work)[:, None] * age  # (Q, L)
        real, imag = self.residues.to(work).unbind(-1)  # (D, Q) each
        tail = real @ (radius * turn.cos()) - imag @ (radius * turn.sin())  # (D, L)
        head = self.head.to(compute_dtype(self.head.dtype))  # (D, w)
        return torch.where(position < self.window, fit_taps(head, length), tail.to(head.dtype))

    def recurrence(self) -> ModalRecurrence:
        return ModalRecurrence(self)
