"""Decoding a modal kernel (see `tno_modal.py`): a diagonal recurrence, advanced a block of tokens at a time.

    s_C = sum_{p < C} lambda^(C-1-p) v_p,    what it adds to y_t:  Re sum_q r_q lambda_q^(t-C+1-w) s_C,q          (1)

B batch, D channels, Q modes, w window, C tokens covered by the memory s, T tokens seen. At the start of a block the
memory takes in the inputs that are old enough, by one product with powers of the poles; (1) gives what it adds to the
outputs of the block; the younger inputs, which still lie in the register, add theirs through the first taps, as in
`FilterRecurrence`. The memory stays w + 64 tokens behind, so that the newest tokens can be taken back.
"""

import torch
from torch.nn.functional import pad

from .recurrence import FilterRecurrence
from .register import CHUNK_SLACK, SLACK, ShiftRegister

BLOCK = 32


class ModalRecurrence(FilterRecurrence):
    """Decoding of a `ModalOperator` with a state that does not depend on the length of the text.

    Args:
        operator: has `window`, `powers` and `complex_residues`.
        stagger: share of the first block that is left out.
    """

    def __init__(self, operator, stagger: float):
        super().__init__(operator, None, stagger)
        self.horizon = self.base = BLOCK
        self.first_block = BLOCK - int(stagger * BLOCK)
        self.window = operator.window

    def forget(self):
        super().forget()
        self._powers: dict[tuple[int, int], torch.Tensor] = {}
        self._cached_residues: torch.Tensor | None = None

    def hold(self, state) -> tuple:
        return *super().hold(state), state.tensors["memory"], self._age(state)

    def outputs(self, held: tuple, x: torch.Tensor) -> torch.Tensor:
        past, memory, age = held
        y = super().outputs((past,), x)
        if age is None:
            return y
        exponents = torch.arange(age, age + x.shape[-1], device=x.device)
        powers, residues = self.operator.powers(exponents), self.operator.complex_residues()
        return y + far_outputs(memory, residues.to(memory.dtype), powers.to(memory.dtype))

    def start(self, state, x: torch.Tensor):
        memory = torch.zeros(*x.shape[:2], self.operator.angle.numel(), dtype=x.dtype.to_complex(), device=x.device)
        state.tensors["memory"] = memory  # (B, D, Q)
        state.counters = {"block": self.first_block, "covered": 0}
        self._advance_memory(state, x, x.shape[-1] - self.window - SLACK)
        state.register = ShiftRegister(x, self.window + BLOCK)

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = self._past(state)  # (B, D, P)
        y = self._continue(torch.cat([past, x], dim=-1), past.shape[-1], x.shape[-1])  # (B, D, L)
        y = y + self._from_memory(state, x.shape[-1])
        behind = self.window + max(SLACK, min(x.shape[-1], CHUNK_SLACK))
        self._advance_memory(state, torch.cat([past, x], dim=-1), state.length + x.shape[-1] - behind)
        state.register.append(x)
        state.tensors.pop("future", None)
        return y

    def removable(self, state) -> int:
        covered = state.counters["covered"]
        return state.length - covered - self.window if covered else state.length

    def _reach(self, state) -> int:
        """The inputs that the memory does not cover."""
        return state.length - state.counters["covered"]

    def _fill(self, state, like: torch.Tensor):
        self._advance_memory(state, self._past(state), state.length - self.window - SLACK)
        past = self._past(state)
        longest = self.window + SLACK
        padded = pad(past, (max(0, longest - past.shape[-1]), 0))  # one transform length for all fills
        keep = padded.shape[-1] == longest
        near = self._continue(padded, padded.shape[-1], BLOCK, keep)
        state.tensors["future"] = near + self._from_memory(state, BLOCK)
        state.counters["position"] = 0

    def _advance_memory(self, state, waiting: torch.Tensor, until: int):
        """Cover the tokens before `until`; `waiting` `(B, D, P)` begins with the first one not covered."""
        count = until - state.counters["covered"]
        if count <= 0:
            return
        powers = self._power(0, count, waiting).flip(1).t()  # (count, Q): lambda^(count-1) .. lambda^0
        inputs = waiting[..., :count]
        added = torch.complex(inputs @ powers.real, inputs @ powers.imag)  # (B, D, Q)
        faded = self._power(count, 1, waiting)[:, 0]  # (Q,)
        state.tensors["memory"] = state.tensors["memory"] * faded + added
        state.counters["covered"] = until

    def _from_memory(self, state, count: int) -> torch.Tensor:
        """What the memory adds to the next `count` outputs, `(B, D, count)`."""
        memory, age = state.tensors["memory"], self._age(state)
        if age is None:
            return memory.real.new_zeros(*memory.shape[:2], count)
        return far_outputs(memory, self._residues(memory), self._power(age, count, memory))

    def _age(self, state) -> int | None:
        """The exponent in (1) of the next output; None while the memory covers nothing."""
        covered = state.counters["covered"]
        return state.length - covered + 1 - self.window if covered else None

    def _power(self, first: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """lambda^first .. lambda^(first+count-1), complex `(Q, count)`."""
        exponents = torch.arange(first, first + count, device=like.device)
        dtype = like.dtype if like.is_complex() else like.dtype.to_complex()
        if count > BLOCK:
            return self.operator.powers(exponents).to(dtype)
        if (first, count) not in self._powers:
            self._powers[first, count] = self.operator.powers(exponents).to(dtype)
        return self._powers[first, count]

    def _residues(self, like: torch.Tensor) -> torch.Tensor:
        if self._cached_residues is None:
            self._cached_residues = self.operator.complex_residues().to(like.dtype)
        return self._cached_residues


def far_outputs(memory: torch.Tensor, residues: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Equation (1) for a memory `(B, D, Q)`, residues `(D, Q)` and `count` powers `(Q, count)`: `(B, D, count)`."""
    weighted = memory * residues  # (B, D, Q)
    return weighted.real @ powers.real - weighted.imag @ powers.imag
