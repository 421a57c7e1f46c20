"""Apply a sparse plus low-rank operator by structured kernel interpolation ("SKI to go Faster": SKI-TNO).

    T = S + W A W^T,    W_ik = max(0, 1 - |i / h - k|)                                                       (1)
    released  W_iu = f a, W_i(u+1) = f (1 - a),  u = min(smallest k with k h >= s_i, R - 2),  a = s_i / h - u,
              s_i = i P / (P - 1),  f = lambda^(s_i P)                                                       (2)

B batch, L length, D channels, K points, R inducing points, P = `ski_grid_length`. S is a band matrix, a short filter.
A is the Toeplitz matrix of the kernel at the inducing points, which are h = (P - 1)/(R - 1) positions apart. W
interpolates linearly between them (section 3.2.1). Away from the band the kernel is a function of the inverse time
warp x(s) = sign(s) lambda^|s| of the lag s (sign(0) = +1), piecewise linear between 2R + 1 equally spaced points of
[-1, 1] with the values betas, 0, alphas.

The grid does not depend on the input: a sequence of L <= P positions uses the first inducing points, and a longer one
gets more points at the same distance. (The paper scales the grid to each input; for L = P both agree.) W A W^T is
close to a Toeplitz matrix, but not exactly one: `coefficients` gives the Toeplitz matrix that it approximates.

(2) is for models that were trained with the released code (`ski_interpolation="released"`). It is not linear
interpolation: u is the point after the position, the weights are exchanged, and f fades within a few positions. The
released code takes the length of each input for P; they agree for inputs of P positions. Rows beyond P are zero.

The fused products `Prolong`, z W^T, and `Restrict`, x W, do not build W: positions are processed in blocks of a few
points, each by one small dense product, a few of the M rows of x at a time. The results of `Restrict` are stored point
by point (measured at L = 2048, K = 64, M = 6144: 0.4 times the time of the full product; row by row, 1.2).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .configuration_tnn import DIRECTIONS
from .extensions import extensions
from .numerics import (
    compute_dtype,
    float64_or_widest,
    is_exported,
    is_fused,
    is_on_host,
    is_transformed,
    next_fast_len,
)
from .tno import Kernel, ToeplitzOperator
from .tno_rpe import fading
from .toeplitz import dense_toeplitz, exported_convolution, fit_lags, toeplitz_matmul

BLOCK, ROWS = 8, 512  # points in a block, and rows at a time
LARGEST_MATRIX = 2**24  # numbers in a matrix W that an accelerator builds


# Standard deviations of m taps and of the values alphas and betas at the start.
INITIAL_DEVIATIONS = {"normal": lambda taps: (1.0, 1.0), "local": lambda taps: (taps**-0.5, 0.0)}


def interpolation_weights(distances: torch.Tensor) -> torch.Tensor:
    """The weights of linear interpolation between values at distance 1, at signed `distances` from them."""
    return (1 - distances.abs()).clamp(min=0)


class InducingGrid(NamedTuple):
    """The inducing points of a sequence, at the distance h = steps / intervals."""

    length: int  # number of positions L
    intervals: int
    steps: int

    @property
    def num_points(self) -> int:
        """The number of points K: the smallest that reaches the last position."""
        return ((self.length - 1) * self.intervals + self.steps - 1) // self.steps + 1

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Blocks of positions, each with the slice of points that have a weight there."""
        for point in range(0, self.num_points, BLOCK):
            # The first positions at or after two points, counted from the one at the first position.
            start, stop = (-(-end * self.steps // self.intervals) for end in (point, point + BLOCK))
            stop = min(stop, self.length)
            if start < stop:
                yield slice(start, stop), slice(point, min(point + BLOCK + 1, self.num_points))

    def weights(self, positions: slice, points: slice, like: torch.Tensor) -> torch.Tensor:
        """One block of W in the dtype of `like`. In whole numbers: float32 has no digits left behind a million."""
        places = torch.arange(positions.start, positions.stop, device=like.device) * self.intervals  # (M,)
        points = torch.arange(points.start * self.steps, points.stop * self.steps, self.steps, device=like.device)
        return interpolation_weights((places[:, None] - points).to(like.dtype) / self.steps)

    def matrix(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix W, `(L, K)`."""
        return self.weights(slice(0, self.length), slice(0, self.num_points), like)


class ReleasedGrid(NamedTuple):
    """The inducing points of a sequence, as `InducingGrid`, with the whole matrix W as its only block, by (2)."""

    length: int  # number of positions L
    num_points: int  # R, for every length
    longest: int  # P
    decay: float  # lambda

    def blocks(self) -> list[tuple[slice, slice]]:
        """One block of all positions and points."""
        return [(slice(0, self.length), slice(0, self.num_points))]

    def weights(self, positions: slice, points: slice, like: torch.Tensor) -> torch.Tensor:
        """The only block of W, in the dtype of `like`."""
        return self.matrix(like)

    def matrix(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix W, `(L, R)`."""
        last_point, last = self.num_points - 1, self.longest - 1
        row = torch.arange(self.length, device=like.device)[:, None]  # (L, 1)
        # In whole numbers: the released comparison of floating-point numbers is right for exact ones.
        upper = (-(-row * self.longest * last_point // last**2)).clamp(max=last_point - 1)  # (L, 1)
        place = row.to(float64_or_widest(like.device)) * self.longest / last  # (L, 1), s
        share = place * last_point / last - upper
        fade = torch.where(row < self.longest, torch.pow(self.decay, place * self.longest), 0)
        weights = place.new_zeros(self.length, self.num_points)
        weights = weights.scatter(1, upper, fade * share).scatter(1, upper + 1, fade * (1 - share))
        return weights.to(like.dtype)


class Restrict(torch.autograd.Function):
    """The product x W in blocks, `(M, L)` to `(M, K)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, grid: InducingGrid) -> torch.Tensor:
        ctx.grid = grid
        z = x.new_zeros(grid.num_points, len(x))
        blocks = [(*block, grid.weights(*block, x).t()) for block in grid.blocks()]
        for start in range(0, len(x), ROWS):
            rows = slice(start, start + ROWS)
            for positions, points, weights in blocks:
                z[points, rows].addmm_(weights, x[rows, positions].t())
        return z.t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        if is_transformed(gradient):
            return gradient @ ctx.grid.matrix(gradient).t(), None
        return Prolong.apply(gradient, None, ctx.grid), None


class Prolong(torch.autograd.Function):
    """The product base + z W^T in blocks, `(M, K)` to `(M, L)`; base is `(M, L)` or None."""

    @staticmethod
    def forward(ctx, z: torch.Tensor, base: torch.Tensor | None, grid: InducingGrid) -> torch.Tensor:
        ctx.grid = grid
        x = z.new_empty(len(z), grid.length)
        given, beta = (x, 0) if base is None else (base, 1)
        for positions, points in grid.blocks():
            weights = grid.weights(positions, points, z).t()
            torch.addmm(given[:, positions], z[:, points], weights, beta=beta, out=x[:, positions])
        return x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        eager = is_transformed(gradient)
        z = gradient @ ctx.grid.matrix(gradient) if eager else Restrict.apply(gradient, ctx.grid)
        return z, gradient if ctx.needs_input_grad[1] else None, None


class SkiOperator(ToeplitzOperator):
    """The sparse plus low-rank operator, bidirectional only. It is not shift-invariant."""

    supports_causal, supports_bidirectional = DIRECTIONS["ski"]
    shift_invariant = False
    channel_parameters = {"filter": 1, "alphas": 1, "betas": 1}

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.rank, self.decay, self.longest = config.ski_rank, config.ski_decay, config.ski_grid_length
        self.kind, self.initializer = config.ski_interpolation, config.ski_initializer
        self.filter = nn.Parameter(torch.empty(self.channels, config.ski_filter_size // 2 * 2 + 1))
        self.alphas = nn.Parameter(torch.empty(self.channels, self.rank))
        self.betas = nn.Parameter(torch.empty(self.channels, self.rank))

    def reset_parameters(self):
        of_taps, of_values = INITIAL_DEVIATIONS[self.initializer](self.filter.shape[1])
        init.normal_(self.filter, std=of_taps)
        for values in (self.alphas, self.betas):
            init.normal_(values, std=of_values)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the operator computes in."""
        return compute_dtype(self.filter.dtype)

    def warped_kernel(self, lags: torch.Tensor) -> torch.Tensor:
        """The kernel without the short filter at the `lags` `(M,)`, `(D, M)`."""
        warped = torch.where(lags < 0, -1.0, 1.0).to(lags.dtype) * fading(self.decay, lags)  # (M,)
        points = torch.arange(-self.rank, self.rank + 1, device=lags.device, dtype=lags.dtype)  # (2R+1,)
        values = torch.cat([self.betas, torch.zeros_like(self.betas[:, :1]), self.alphas], dim=1)  # (D, 2R+1)
        return values.to(lags.dtype) @ interpolation_weights(warped[:, None] * self.rank - points).t()

    def grid(self, length: int) -> InducingGrid | ReleasedGrid:
        """The inducing points of a sequence of `length` positions."""
        if self.kind == "released":
            return ReleasedGrid(length, self.rank, self.longest, self.decay)
        return InducingGrid(length, self.rank - 1, max(self.longest - 1, 1))

    def inducing_coefficients(self, num_points: int) -> torch.Tensor:
        """The coefficients of A, `(D, 2 num_points - 1)`."""
        index = torch.arange(1 - num_points, num_points, device=self.filter.device, dtype=self.dtype)
        return self.warped_kernel(index * ((self.longest - 1) / (self.rank - 1)))

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        lags = torch.arange(1 - length, length, device=self.filter.device, dtype=self.dtype)  # (2L-1,)
        coefficients = self.warped_kernel(lags) + fit_lags(self.filter.to(self.dtype).flip(1), length)
        return coefficients.to(device or coefficients.device)

    def kernel_of(self, length: int, device: torch.device | None = None, as_taps: bool = False) -> Kernel:
        """The coefficients of S and of A."""
        return self.filter.to(self.dtype).flip(1), self.inducing_coefficients(self.grid(length).num_points)

    def matmul(self, v: torch.Tensor, kernel: Kernel | None = None) -> torch.Tensor:
        x = v.to(torch.promote_types(v.dtype, self.dtype)).permute(2, 0, 1)  # (D, B, L)
        grid = self.grid(x.shape[2])
        band, coefficients = self.kernel_of(grid.length) if kernel is None else kernel
        near = self._convolve_channels(x, band)  # (D, B, L)
        # On an accelerator two products with a small W are fewer launches than those of all blocks.
        if is_fused(self.implementation) and (is_on_host(x) or grid.length * grid.num_points > LARGEST_MATRIX):
            points = Restrict.apply(x.reshape(-1, grid.length), grid).unflatten(0, x.shape[:2])  # (D, B, K)
            points = self._convolve_channels(points, coefficients).flatten(0, 1)
            mixed = Prolong.apply(points, near.reshape(-1, grid.length), grid).unflatten(0, x.shape[:2])  # (D, B, L)
        else:
            weights = grid.matrix(x)  # (L, K)
            points = self._convolve_points(x @ weights, coefficients, grid)  # (D, B, K)
            mixed = points @ weights.t() + near  # (D, B, L)
        return mixed.permute(1, 2, 0).to(v.dtype)  # (B, L, D)

    def _convolve_points(self, x: torch.Tensor, coefficients: torch.Tensor, grid) -> torch.Tensor:
        if not is_exported() or extensions.keeps_products():
            return self._convolve_channels(x, coefficients)
        # The size follows from L: torch.export cannot see that a size that follows from K is sufficient.
        size = next_fast_len(2 * (grid.num_points if self.kind == "released" else grid.length))
        return exported_convolution(x.transpose(0, 1), coefficients, size, grid.num_points - 1).transpose(0, 1)

    def _convolve_channels(self, x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return toeplitz_matmul(x.permute(1, 2, 0), coefficients, self.implementation).permute(2, 0, 1)

    def dense(self, length: int) -> torch.Tensor:
        band, coefficients = self.kernel_of(length)
        weights = self.grid(length).matrix(band)  # (L, K)
        return weights @ dense_toeplitz(coefficients) @ weights.t() + dense_toeplitz(fit_lags(band, length))
