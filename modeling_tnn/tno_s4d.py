"""Compute the coefficients of diagonal state-space models, one for each channel (S4D), and decode with them.

    x'(s) = diag(alpha) x(s) + u(s),    y(s) = 2 Re c x(s) + d u(s)                                          (1)
    t_k = 2 Re sum_q c_q g_q lambda_q^k,    and d more at k = 0                                              (2)
    t_{bi+j} = Re sum_q (w_q lambda_q^{bi}) lambda_q^j,    0 <= j < b                                        (3)
    gradient of w = conj(S),    gradient of (rate, angle) = (-Re(w S'), -Im(w S'))                           (4)

B batch, D channels, L length, N = `s4d_state_size`, Q = N / 2 modes (each stands for itself and its conjugate),
b block. A step of size Delta = exp(`log_step`) turns a pole alpha_q = -exp(`log_real`) + i `imag` of (1) into the
pole lambda_q of (2), and its input weight 1 into the gain g_q; all poles lie inside the unit circle. A bidirectional
operator has a second kernel for negative lags: t_{-k} is its tap k - 1, without d. (Gu, Gupta, Goel and Ré, "On the
Parameterization and Initialization of Diagonal State Space Models", 2022, sections 3 and 4.)

(3) is (2) with w = 2 c g and k = b i + j. It needs Q (L / b + b) powers instead of the Q L of the Vandermonde matrix
lambda_q^k, and one product of matrices for each channel. In (4), for a gradient G of the taps, S = sum_k G_k lambda^k
and S' = sum_k k G_k lambda^k by the same two levels. The recurrence is that of `tno_modal.py`.
"""

import math
from functools import partial

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import initialization as init

from .numerics import compute_dtype, float64_or_widest, is_exported, is_fused, is_traced
from .tno_modal import ModesOperator, Poles
from .toeplitz import Pair, entries
from .toeplitz_fused import differentiable_gradients, must_differentiate

# The least block b, and that of recorded graphs. Kernels of all lengths up to its square are the same sums.
LEAST_BLOCK = 64


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


class DiagonalOperator(ModesOperator):
    """An operator with poles of each filter: its `modes` are the poles and the weights w of (3), also `(2D, Q)`."""

    kernel_in_parts = True
    window = exponent = 1  # the tap at lag 0, which has d, is apart from the modes
    direct: nn.Parameter | None  # d, `(D,)`

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
