"""Compute the coefficients of diagonal state-space models, one for each channel (S4D), and decode with them.

    x'(s) = diag(alpha) x(s) + u(s),    y(s) = 2 Re c x(s) + d u(s)                                          (1)
    t_k = 2 Re sum_q c_q g_q lambda_q^k,    and d more at k = 0                                              (2)
    t_{bi+j} = Re sum_q (w_q lambda_q^{bi}) lambda_q^j,    0 <= j < b                                        (3)
    gradient of w = conj(S),    gradient of (rate, angle) = (-Re(w S'), -Im(w S'))                           (4)
    s_C = sum_{p < C} lambda^(C-1-p) v_p,    its part of y_t:  Re sum_q w_q lambda_q^(t-C+1) s_C,q           (5)

B batch, D channels, L length, N = `s4d_state_size`, Q = N / 2 modes (each stands for itself and its conjugate),
b block, C tokens covered by the memory s. A step of size Delta = exp(`log_step`) turns a pole
alpha_q = -exp(`log_real`) + i `imag` of (1) into the pole lambda_q of (2), and its input weight 1 into the gain g_q;
all poles lie inside the unit circle. A bidirectional operator has a second kernel for negative lags: t_{-k} is its
tap k - 1, without d. (Gu, Gupta, Goel and Ré, "On the Parameterization and Initialization of Diagonal State Space
Models", 2022, sections 3 and 4.)

(3) is (2) with w = 2 c g and k = b i + j. It needs Q (L / b + b) powers instead of the Q L of the Vandermonde matrix
lambda_q^k, and one product of matrices for each channel. In (4), for a gradient G of the taps, S = sum_k G_k lambda^k
and S' = sum_k k G_k lambda^k by the same two levels. (5) is the recurrence of `tno_modal.py` with the window 1 and
with poles of each channel.
"""

import math
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import initialization as init

from .numerics import compute_dtype, float64_or_widest, is_exported, is_fused, is_traced
from .recurrence import PIECE, DecodingState
from .tno import ToeplitzOperator, require_causal
from .tno_modal import ModalRecurrence
from .toeplitz import Pair, entries
from .toeplitz_fused import differentiable_gradients, must_differentiate

# The least block b, and that of recorded graphs. Kernels of all lengths up to its square are the same sums.
LEAST_BLOCK = 64


class Poles(NamedTuple):
    """The discrete poles exp(-rate + i angle), `(D, Q)` each."""

    rate: torch.Tensor
    angle: torch.Tensor

    def powers(self, exponents: torch.Tensor) -> Pair:
        """The powers with the exponents `(M,)`, `(D, M, Q)`."""
        exponents = exponents.to(self.rate.dtype)[:, None]  # (M, 1)
        radius, turn = torch.exp(-self.rate[:, None] * exponents), self.angle[:, None] * exponents  # (D, M, Q)
        return Pair(radius * turn.cos(), radius * turn.sin())


def zero_order_hold(alpha: Pair, step: torch.Tensor) -> tuple[Poles, Pair]:
    """lambda = exp(Delta alpha) and g = (lambda - 1) / alpha, for alpha `(D, Q)` and steps Delta `(D, 1)`."""
    growth, angle = step * alpha.real, step * alpha.imag  # (D, Q)
    # lambda - 1 without the difference of two numbers near 1.
    real = torch.expm1(growth) * angle.cos() - 2 * torch.sin(angle / 2).square()
    return Poles(-growth, angle), Pair(real, growth.exp() * angle.sin()).over(alpha)


def bilinear(alpha: Pair, step: torch.Tensor) -> tuple[Poles, Pair]:
    """lambda = (1 + Delta alpha / 2) / (1 - Delta alpha / 2) and g = Delta / (1 - Delta alpha / 2): Tustin's rule."""
    half = Pair(step * alpha.real / 2, step * alpha.imag / 2)  # (D, Q)
    ahead, behind, turn = (1 + half.real).square(), (1 - half.real).square(), half.imag.square()
    squared = ((ahead + turn) / (behind + turn)).clamp(min=torch.finfo(step.dtype).tiny)  # 0 has no logarithm
    angle = torch.atan2(2 * half.imag, 1 - half.real.square() - turn)
    gain = Pair(step, torch.zeros_like(step)).over(Pair(1 - half.real, -half.imag))  # (D, Q)
    return Poles(-squared.log() / 2, angle), gain


DISCRETIZATIONS = {"zoh": zero_order_hold, "bilinear": bilinear}


def linear_modes(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha_n = -1/2 + i pi n (S4D-Lin): imaginary parts, and sizes of the input weights, `(Q,)` each, float64."""
    index = torch.arange(size // 2, dtype=torch.float64)
    return math.pi * index, torch.ones_like(index)


def inverse_modes(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha_n = -1/2 + i (N / pi) (N / (2n + 1) - 1) (S4D-Inv), as `linear_modes`."""
    index = torch.arange(size // 2, dtype=torch.float64)
    return size / math.pi * (size / (2 * index + 1) - 1), torch.ones_like(index)


def legendre_modes(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The eigenvalues of the normal part of HiPPO-LegS, -1/2 I + S with S antisymmetric (S4D-LegS), as `linear_modes`.

    S_nk = -sqrt((n + 1/2) (k + 1/2)) below the diagonal; in its eigenvectors V the input weights are V* sqrt(2n + 1).
    """
    root = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    below = torch.tril(torch.outer(root, root), diagonal=-1)  # (N, N)
    values, vectors = torch.linalg.eigh(1j * (below - below.T))  # of -i S, ascending; they come in pairs +-
    chosen = vectors[:, size // 2 :]
    return values[size // 2 :], (chosen.conj().T @ (math.sqrt(2) * root).to(chosen.dtype)).abs()


INITIAL_MODES = {"lin": linear_modes, "inv": inverse_modes, "legs": legendre_modes}


def vandermonde_product(real, imag, rate, angle, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Re sum_q w_q lambda_q^k for k = 0 .. L-1, by (3), a product in `dtype` of powers in that of the poles.

    Weights and poles are `(D, Q)` each, the taps `(D, L)`.
    """
    poles, block, device = Poles(rate, angle), block_length(length), rate.device
    within = poles.powers(torch.arange(block, device=device))  # (D, b, Q)
    # A recorded graph has at least two blocks, one of them for nothing: a single one would make it a graph of its own.
    blocks = length // block + 2 if is_traced() else -(-length // block)  # I
    starts = poles.powers(block * torch.arange(blocks, device=device))  # (D, I, Q)
    product = join_levels(Pair(real[:, None], imag[:, None]).times(starts), within, dtype)
    return entries(product, 0, length) if is_exported() else product[:, :length]


def join_levels(moved, within, dtype: torch.dtype) -> torch.Tensor:
    """The sums (3) `(D, I b)`: real parts of the products of w lambda^(bi) `(D, I, Q)` and lambda^j `(D, b, Q)`."""
    left = torch.cat([moved.real, -moved.imag], dim=-1).to(dtype)  # (D, I, 2Q)
    return (left @ joined(within, dtype).mT).flatten(1)


class VandermondeProduct(torch.autograd.Function):
    """`vandermonde_product`, of which only the inputs are saved, not the powers; gradients by (4)."""

    @staticmethod
    def forward(ctx, real, imag, rate, angle, length: int, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(real, imag, rate, angle)
        ctx.length, ctx.dtype = length, dtype
        within, starts = two_levels(Poles(rate, angle), length)  # (D, b, Q), (D, I, Q)
        return join_levels(torch.complex(real, imag)[:, None] * starts, within, dtype)[:, :length]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        real, imag, rate, angle = saved = ctx.saved_tensors
        if must_differentiate(gradient):
            taps = partial(vandermonde_product, length=ctx.length, dtype=ctx.dtype)
            return *differentiable_gradients(taps, saved, ctx.needs_input_grad, gradient), None, None
        within, starts = two_levels(Poles(rate, angle), ctx.length)
        block, blocks = within.shape[1], starts.shape[1]
        g = pad(gradient, (0, block * blocks - ctx.length)).unflatten(1, (blocks, block))  # (D, I, b)
        right, lags = joined(within, ctx.dtype), torch.arange(block, device=g.device, dtype=ctx.dtype)
        sums = (torch.complex(*(part @ right).to(rate.dtype).chunk(2, dim=-1)) for part in (g, g * lags))
        plain, weighted = (starts * part for part in sums)  # (D, I, Q) each
        first = block * torch.arange(blocks, device=g.device, dtype=rate.dtype)[:, None]  # (I, 1)
        total = plain.sum(1)  # (D, Q): S
        slope = torch.complex(real, imag) * (weighted + first * plain).sum(1)  # (D, Q): w S'
        return total.real, -total.imag, -slope.real, -slope.imag, None, None


def two_levels(poles: Poles, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The powers of (3), complex: lambda^j `(D, b, Q)` and lambda^(bi) `(D, I, Q)`."""
    block = block_length(length)
    step = torch.exp(torch.complex(-poles.rate, poles.angle))  # (D, Q)
    return repeated(step, block), repeated(step**block, -(-length // block))


def repeated(step: torch.Tensor, count: int) -> torch.Tensor:
    """The powers 0 .. count - 1 of `(D, Q)` numbers, `(D, count, Q)`, by products: exponentials take far longer."""
    powers = torch.ones_like(step)[:, None]
    while powers.shape[1] < count:
        powers = torch.cat([powers, powers[:, : count - powers.shape[1]] * step[:, None]], dim=1)
        step = step * step
    return powers


def joined(powers: torch.Tensor | Pair, dtype: torch.dtype) -> torch.Tensor:
    """Real parts before imaginary ones, `(..., Q)` to `(..., 2Q)`."""
    return torch.cat([powers.real, powers.imag], dim=-1).to(dtype)


def block_length(length: int) -> int:
    """The block b: a power of two near the square root of the length, with which (3) has the fewest powers."""
    return LEAST_BLOCK if is_traced() else max(LEAST_BLOCK, 1 << ((length - 1).bit_length() + 1) // 2)


class DiagonalRecurrence(ModalRecurrence):
    """Decode an `S4dOperator` as `ModalRecurrence` does, with the powers of the poles of each channel.

    Chunks are read and written a block of H tokens at a time: the powers of all tokens would take too much memory.
    """

    _aged: tuple[int, torch.Tensor] = (-1, None)  # most blocks begin at the same age

    @cached_property
    def _table(self) -> torch.Tensor:
        """The powers lambda^0 .. lambda^H, real parts before imaginary ones, `(D, H + 1, 2Q)`."""
        like = next(self.operator.parameters())
        powers = self.operator.modes()[0].powers(torch.arange(self.horizon + 1, device=like.device))
        return torch.cat(powers, dim=-1).to(compute_dtype(like.dtype))

    def _powers_of_piece(self, x: torch.Tensor) -> None:
        return None

    def advance_memory(self, state: DecodingState, waiting: torch.Tensor, until: int, powers: None = None):
        count, size = until - state.counters.covered, self.horizon
        if count <= 0:
            return
        table, memory, rest = self._table, state.tensors["memory"], count % size
        parts = waiting[..., :count].split([count - rest, rest], dim=-1)
        for piece in (one for part in parts if part.shape[-1] for one in part.split(PIECE, dim=-1)):
            length = min(size, piece.shape[-1])
            blocks = piece.unflatten(-1, (-1, length)).flip(-1)  # (B, D, I, H)
            added = torch.einsum("bdin,dnq->bdiq", blocks, table[:, :length])  # (B, D, I, 2Q)
            fading = complex_of(table[:, length])  # (D, Q)
            for one in complex_of(added).unbind(2):
                memory = memory * fading + one
        state.tensors["memory"] = memory
        state.counters.covered = until

    def _from_memory(self, state: DecodingState, count: int) -> torch.Tensor:
        memory, age = state.tensors["memory"], self._age(state)
        if self._aged[0] != age:
            self._aged = age, self.operator.complex_residues(age).to(memory.dtype)  # (D, Q)
        table, weights, parts = self._table, memory * self._aged[1], []
        for start in range(0, count, self.horizon):
            length = min(self.horizon, count - start)
            both = torch.cat([weights.real, -weights.imag], dim=-1)  # (B, D, 2Q)
            parts.append(torch.einsum("bdq,dnq->bdn", both, table[:, :length]))
            weights = weights * complex_of(table[:, -1])
        return torch.cat(parts, dim=-1)


def complex_of(parts: torch.Tensor) -> torch.Tensor:
    """Complex numbers `(..., Q)` from their real parts and, after them, their imaginary parts, `(..., 2Q)`."""
    return torch.complex(*parts.chunk(2, dim=-1))


class DiagonalOperator(ToeplitzOperator):
    """An operator with sums of exponentials, `num_modes` of each filter, as kernels. A variant defines `modes`."""

    is_recurrence = kernel_in_parts = True
    window = 1  # of `ModalRecurrence`: the tap at lag 0, which has d, is apart from the modes
    direct: nn.Parameter | None  # d, `(D,)`
    num_modes: int

    def modes(self) -> tuple[Poles, Pair]:
        """The poles and the weights w of all filters, `(D, Q)` or `(2D, Q)` each, in float64."""
        raise NotImplementedError

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """The powers lambda_q^n for the exponents `(M,)`, complex `(D, Q, M)`, in float64."""
        return torch.complex(*self.modes()[0].powers(exponents)).mT

    def complex_residues(self, age: int = 0) -> torch.Tensor:
        """The weights w lambda^(age + 1) of a memory in the output of this age, see (5), complex `(D, Q)`."""
        poles, weights = self.modes()
        power = poles.powers(torch.tensor([age + 1], device=poles.rate.device))  # (D, 1, Q)
        return torch.complex(*weights.times(Pair(*(part[:, 0] for part in power))))

    def slowest_rate(self) -> torch.Tensor:
        """The smallest -log|lambda_q| of all modes, `()`, not below 0."""
        return self.modes()[0].rate.min().clamp(min=0).abs()  # not -0, whose inverse is -inf

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        (poles, weights), like = self.modes(), next(self.parameters())
        product = VandermondeProduct.apply if is_fused(self.implementation) else vandermonde_product
        kernel = product(*weights, *poles, length, compute_dtype(like.dtype))  # (D, L) or (2D, L)
        kernel = kernel.to(device or like.device)
        filters = len(kernel) // (1 if self.causal else 2)  # D, or those of several layers
        positive = kernel[:filters]  # (D, L)
        if self.direct is not None:
            # Not a slice of the other taps: L - 1 of them may be 1, which torch.export would rule out.
            first = (torch.arange(length, device=kernel.device) == 0).to(kernel.dtype)  # (L,)
            positive = positive + self.direct.to(kernel)[:, None] * first
        if self.causal:
            return positive
        return torch.cat([kernel[filters:].flip(1), positive], dim=1)[:, 1:]  # (D, 2L-1)

    def recurrence(self) -> DiagonalRecurrence:
        require_causal(self)
        return DiagonalRecurrence(self)


class S4dOperator(DiagonalOperator):
    """The operator of diagonal state-space models, equation (2)."""

    fp32_parameters = ("log_real", "imag", "log_step")  # in bfloat16 phases are wrong after a few lags

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        sides, self.num_modes = (1 if self.causal else 2), config.s4d_state_size // 2
        filters = sides * self.channels
        self.initializer, self.discretization = config.s4d_initializer, config.s4d_discretization
        self.dt_min, self.dt_max = config.s4d_dt_min, config.s4d_dt_max
        self.log_real = nn.Parameter(torch.empty(filters, self.num_modes))
        self.imag = nn.Parameter(torch.empty(filters, self.num_modes))
        self.log_step = nn.Parameter(torch.empty(filters))
        self.weights = nn.Parameter(torch.empty(filters, self.num_modes, 2))
        self.direct = nn.Parameter(torch.empty(self.channels))
        self.channel_parameters = {"log_real": sides, "imag": sides, "log_step": sides, "weights": sides, "direct": 1}

    def reset_parameters(self):
        imag, scale = INITIAL_MODES[self.initializer](2 * self.num_modes)  # (Q,) each
        init.constant_(self.log_real, math.log(0.5))
        init.copy_(self.imag, imag.expand_as(self.imag))
        init.uniform_(self.log_step, math.log(self.dt_min), math.log(self.dt_max))
        init.normal_(self.weights, std=0.5**0.5)  # complex numbers of variance 1, as in the paper
        init.copy_(self.weights, self.weights * scale[:, None].to(self.weights))
        init.normal_(self.direct)
        if self.slow_start:
            self.start_slowly()

    def start_slowly(self):
        """Begin with exponentials as the slowest modes; the others have no weight. With alpha = -1/2, 2 c g = 1."""
        index = torch.arange(self.num_modes, device=self.imag.device)
        slowest = index == self.imag[0].abs().argmin()  # (Q,)
        constants = self.time_constants(self.channels).repeat(len(self.log_step) // self.channels)  # (D,) or (2D,)
        constants = constants.to(self.weights)
        init.copy_(self.imag, self.imag.where(~slowest, 0))
        init.copy_(self.log_step, (2 / constants).log())
        init.copy_(self.weights, torch.stack([constants[:, None] / 4 * slowest, torch.zeros_like(self.imag)], dim=-1))
        init.zeros_(self.direct)

    def modes(self) -> tuple[Poles, Pair]:
        """The poles and the weights w = 2 c g of all filters, `(D, Q)` or `(2D, Q)` each, in float64."""
        dtype = float64_or_widest(self.direct.device)
        alpha = Pair(-self.log_real.to(dtype).exp(), self.imag.to(dtype))  # (D, Q)
        poles, gain = DISCRETIZATIONS[self.discretization](alpha, self.log_step.to(dtype).exp()[:, None])
        real, imag = (2 * self.weights.to(dtype)).unbind(-1)
        return poles, Pair(real, imag).times(gain)
