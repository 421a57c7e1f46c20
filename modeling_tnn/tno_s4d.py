"""Toeplitz coefficients of a diagonal state-space model, one for each channel (S4D), and its decoding.

    t_k = 2 Re sum_q c_q g_q lambda_q^k,    and d more at k = 0                                              (1)
    s_C = sum_{p < C} lambda^(C-1-p) v_p,    its part of y_t:  2 Re sum_q c_q g_q lambda_q^(t-C+1) s_C,q     (2)

B batch, D channels, L length, Q = `s4d_state_size` / 2 modes, C tokens covered by the memory s. The poles lambda and
the gains g follow from alpha_q = -exp(`log_real`) + i `imag` and the step Delta = exp(`log_step`), see `diagonal.py`.
All poles lie inside the unit circle for all values of the parameters. A kernel depends on the products of input and
output weights alone, so c is the only parameter of the two. (Gu, Gupta, Goel and Ré, 2022.)

A bidirectional operator has a second kernel for negative lags: t_{-k} is its tap k - 1, without d.

(2) is the diagonal recurrence of `ModalRecurrence` with the window 1, and with poles of each channel.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from .diagonal import DISCRETIZATIONS, INITIAL_MODES, Pair, Poles, VandermondeProduct, vandermonde_product
from .numerics import compute_dtype, float64_or_widest, is_fused
from .tno import ToeplitzOperator
from .tno_modal import ModalRecurrence


class DiagonalRecurrence(ModalRecurrence):
    """The decoding of an `S4dOperator`. The size of its state does not depend on the length of the text.

    A table has the powers lambda^0 .. lambda^H of all poles, for the H tokens of a block. Longer pieces of text are
    read and written a block at a time, because the powers of all their tokens would take too much memory.
    """

    def forget(self):
        super().forget()
        self._table: torch.Tensor | None = None
        self._aged: tuple[int, torch.Tensor] | None = None

    def _powers_of_piece(self, x: torch.Tensor) -> None:
        return None  # the table has those of a block

    def _advance_memory(self, state, waiting: torch.Tensor, until: int, powers: None = None):
        count = until - state.counters["covered"]
        if count <= 0:
            return
        table, memory = self._powers_of_block(waiting), state.tensors["memory"]
        for block in waiting[..., :count].split(self.horizon, dim=-1):
            length = block.shape[-1]
            added = torch.einsum("bdn,dnq->bdq", block.flip(-1), table[:, :length])  # (B, D, 2Q)
            memory = memory * complex_of(table[:, length]) + complex_of(added)
        state.tensors["memory"] = memory
        state.counters["covered"] = until

    def _from_memory(self, state, count: int) -> torch.Tensor:
        memory, age = state.tensors["memory"], self._age(state)
        if age is None:
            return memory.real.new_zeros(*memory.shape[:2], count)
        table, weights, parts = self._powers_of_block(memory.real), memory * self._aged_weights(age, memory), []
        for start in range(0, count, self.horizon):
            length = min(self.horizon, count - start)
            both = torch.cat([weights.real, -weights.imag], dim=-1)  # (B, D, 2Q)
            parts.append(torch.einsum("bdq,dnq->bdn", both, table[:, :length]))
            weights = weights * complex_of(table[:, -1])
        return torch.cat(parts, dim=-1)

    def _powers_of_block(self, like: torch.Tensor) -> torch.Tensor:
        """The powers lambda^0 .. lambda^H, real parts before imaginary ones, `(D, H + 1, 2Q)`."""
        if self._table is None:
            powers = self.operator.modes()[0].powers(torch.arange(self.horizon + 1, device=like.device))
            self._table = torch.cat(powers, dim=-1).to(like.dtype)
        return self._table

    def _aged_weights(self, age: int, like: torch.Tensor) -> torch.Tensor:
        """The weights of a memory in the output of this age, complex `(D, Q)`. Most blocks begin at the same age."""
        if self._aged is None or self._aged[0] != age:
            self._aged = age, torch.complex(*aged(*self.operator.modes(), age)).to(like.dtype)
        return self._aged[1]


def complex_of(parts: torch.Tensor) -> torch.Tensor:
    """Complex numbers `(..., Q)` from their real parts and, after them, their imaginary parts, `(..., 2Q)`."""
    return torch.complex(*parts.chunk(2, dim=-1))


def aged(poles: Poles, weights: Pair, age: int) -> Pair:
    """The weights w lambda^(age + 1) of a memory in the output of this age, `(D, Q)`; see `ModalRecurrence`."""
    power = poles.powers(torch.tensor([age + 1], device=poles.rate.device))  # (D, 1, Q)
    return weights.times(Pair(*(part[:, 0] for part in power)))


class S4dOperator(ToeplitzOperator):
    """The operator of diagonal state-space models, equation (1)."""

    # The poles stay in float32: in bfloat16 their phases are wrong after a few lags.
    fp32_parameters = ("log_real", "imag", "log_step")
    is_recurrence = True
    # `ModalRecurrence` keeps so many taps apart: that at lag 0, which has d.
    window = 1

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        filters, self.num_modes = self.channels * (1 if self.causal else 2), config.s4d_state_size // 2
        self.initializer, self.discretization = config.s4d_initializer, config.s4d_discretization
        self.dt_min, self.dt_max = config.s4d_dt_min, config.s4d_dt_max
        self.log_real = nn.Parameter(torch.empty(filters, self.num_modes))
        self.imag = nn.Parameter(torch.empty(filters, self.num_modes))
        self.log_step = nn.Parameter(torch.empty(filters))
        self.weights = nn.Parameter(torch.empty(filters, self.num_modes, 2))
        self.direct = nn.Parameter(torch.empty(self.channels))

    def channel_parameters(self) -> dict[str, int]:
        sides = 1 if self.causal else 2
        return {"log_real": sides, "imag": sides, "log_step": sides, "weights": sides, "direct": 1}

    def reset_parameters(self):
        alpha, scale = INITIAL_MODES[self.initializer](2 * self.num_modes)  # (Q,) each
        init.copy_(self.log_real, (-alpha.real).log().expand_as(self.log_real))
        init.copy_(self.imag, alpha.imag.expand_as(self.imag))
        init.uniform_(self.log_step, math.log(self.dt_min), math.log(self.dt_max))
        init.normal_(self.weights, std=0.5**0.5)  # complex numbers of variance 1, as in the paper
        init.copy_(self.weights, self.weights * scale[:, None].to(self.weights))
        init.normal_(self.direct)

    def modes(self) -> tuple[Poles, Pair]:
        """The poles and the weights w = 2 c g of all filters, `(D, Q)` or `(2D, Q)` each, in float64."""
        dtype = float64_or_widest(self.direct.device)
        alpha = Pair(-self.log_real.to(dtype).exp(), self.imag.to(dtype))
        poles, gain = DISCRETIZATIONS[self.discretization](alpha, self.log_step.to(dtype).exp()[:, None])
        real, imag = (2 * self.weights.to(dtype)).unbind(-1)
        return poles, Pair(real, imag).times(gain)

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """The powers lambda_q^n for the exponents `(M,)`, complex `(D, Q, M)`, computed in float64."""
        return torch.complex(*self.modes()[0].powers(exponents)).mT

    def complex_residues(self) -> torch.Tensor:
        """The weights w lambda of each channel at lag 1, complex `(D, Q)`."""
        return torch.complex(*aged(*self.modes(), 0))

    def slowest_rate(self) -> torch.Tensor:
        """The smallest -log|lambda_q| of all modes, `()`."""
        return self.modes()[0].rate.min()

    def poles(self, most: int = 64) -> torch.Tensor:
        return self.powers(torch.ones(1, device=self.imag.device))[:most, :, 0]  # (most, Q)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        (poles, weights), dtype = self.modes(), compute_dtype(self.direct.dtype)
        if is_fused(self.implementation):
            kernel = VandermondeProduct.apply(*weights, *poles, length, dtype)  # (D, L) or (2D, L)
        else:
            weights = Pair(*(part[:, None] for part in weights))
            kernel = vandermonde_product(weights, poles, length, dtype)[:, 0]
        kernel = kernel.to(device or kernel.device)
        # Not a slice of the other taps: L - 1 of them may be 1, which torch.export would rule out.
        first = (torch.arange(length, device=kernel.device) == 0).to(kernel.dtype)  # (L,)
        filters = len(self.direct)  # D, or those of several layers
        positive = kernel[:filters] + self.direct.to(kernel)[:, None] * first  # (D, L)
        if self.causal:
            return positive
        return torch.cat([kernel[filters:].flip(1), positive], dim=1)[:, 1:]  # (D, 2L-1)

    def recurrence(self) -> DiagonalRecurrence:
        self.require_causal()
        return DiagonalRecurrence(self, self.refill_phase)
