"""A sparse plus low-rank operator by structured kernel interpolation ("SKI to go Faster": SKI-TNO).

    T = S + W A W^T

L length, D channels, R inducing points, P = `ski_grid_length`. S is a band matrix, a short filter; A the
Toeplitz matrix of the kernel at the inducing points, which lie h = (P - 1)/(R - 1) positions apart; W interpolates
linearly between them, W_ik = max(0, 1 - |i/h - k|). Away from the band the kernel is a function of the inverse time
warp x(s) = sign(s) lambda^|s| of the lag s (sign(0) = +1), piecewise linear between 2R + 1 equally spaced points of
[-1, 1] with the values betas, 0, alphas; it fades at long lags because x does.

The grid belongs to the model, not to the input: a sequence of L <= P positions takes the first inducing points, a
longer one gets more of them at the same distance (the papers scale the grid to each input; for L = P both agree).
W A W^T is close to, but not exactly, a Toeplitz matrix; `dense` is the operator, `coefficients` what it approximates.
"""

import torch
from torch import nn
from transformers import initialization as init

from .fourier import exported_convolution
from .gating import Gating
from .interpolation import Grid, Prolong, Restrict, hat_weights
from .tno import ToeplitzOperator
from .toeplitz import dense_toeplitz, fft_length, fit_lags, toeplitz_matmul, transform_dtype
from .tracing import is_exported, needs_plain


class SkiOperator(ToeplitzOperator):
    """The sparse plus low-rank operator, bidirectional only. It is not shift-invariant."""

    shift_invariant = False

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.rank, self.decay = config.ski_rank, config.ski_decay
        self.longest = config.ski_grid_length
        self.reach = config.ski_filter_size // 2
        self.filter = nn.Parameter(torch.empty(self.channels, 2 * self.reach + 1))
        self.alphas = nn.Parameter(torch.empty(self.channels, self.rank))
        self.betas = nn.Parameter(torch.empty(self.channels, self.rank))

    def reset_parameters(self):
        for parameter in (self.filter, self.alphas, self.betas):
            init.normal_(parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The precision it computes in."""
        return transform_dtype(self.filter.dtype)

    def warped_kernel(self, lags: torch.Tensor) -> torch.Tensor:
        """The kernel without the short filter at `(M,)` lags, `(D, M)`."""
        warped = torch.where(lags < 0, -1.0, 1.0) * self.decay ** lags.abs()  # (M,)
        values = torch.cat([self.betas, torch.zeros_like(self.betas[:, :1]), self.alphas], dim=1)  # (D, 2R+1)
        return values.to(lags.dtype) @ hat_weights((warped + 1) * self.rank, 2 * self.rank + 1).t()

    def grid(self, length: int) -> Grid:
        """The inducing points of a sequence of `length` positions."""
        return Grid(length, self.rank - 1, max(self.longest - 1, 1))

    def interpolation(self, length: int) -> torch.Tensor:
        """W for a sequence of `length` positions, (L, K)."""
        return self.grid(length).matrix(self.filter.to(self.dtype))

    def inducing_coefficients(self, num_points: int) -> torch.Tensor:
        """The coefficients of A, (D, 2 num_points - 1)."""
        index = torch.arange(1 - num_points, num_points, device=self.filter.device, dtype=self.dtype)
        return self.warped_kernel(index * ((self.longest - 1) / (self.rank - 1)))

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        lags = torch.arange(1 - length, length, device=self.filter.device, dtype=self.dtype)  # (2L-1,)
        return self.warped_kernel(lags) + fit_lags(self.filter.to(self.dtype).flip(1), length)

    def mix(self, v: torch.Tensor, gating: Gating | None = None) -> torch.Tensor:
        x = v if gating is None else gating.open(v)  # (B, L, D)
        x = x.to(torch.promote_types(x.dtype, self.dtype)).permute(2, 0, 1)  # (D, B, L)
        near = self._convolve(x, self.filter.to(x.dtype).flip(1))  # (D, B, L)
        grid = self.grid(x.shape[2])
        coefficients = self.inducing_coefficients(grid.num_points)
        if self.product == "plain" or needs_plain():
            weights = grid.matrix(x)  # (L, K)
            points = x @ weights  # (D, B, K)
            if is_exported():
                # Of a size that follows from L: torch.export does not see that one that follows from K fits.
                size = fft_length(2 * grid.length)
                points = exported_convolution(points.transpose(0, 1), coefficients, size, grid.num_points - 1)
                points = points.transpose(0, 1)
            else:
                points = self._convolve(points, coefficients)
            mixed = points @ weights.t() + near  # (D, B, L)
        else:
            points = Restrict.apply(x.reshape(-1, grid.length), grid).unflatten(0, x.shape[:2])  # (D, B, K)
            points = self._convolve(points, coefficients).flatten(0, 1)
            mixed = Prolong.apply(points, near.reshape(-1, grid.length), grid).unflatten(0, x.shape[:2])  # (D, B, L)
        mixed = mixed.permute(1, 2, 0).to(v.dtype)  # (B, L, D)
        return mixed if gating is None else gating.close(mixed, self.product)

    def _convolve(self, x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return toeplitz_matmul(x.permute(1, 2, 0), coefficients, self.product).permute(2, 0, 1)

    def dense(self, length: int) -> torch.Tensor:
        weights = self.interpolation(length)
        low_rank = weights @ dense_toeplitz(self.inducing_coefficients(weights.shape[1])) @ weights.t()
        return low_rank + dense_toeplitz(fit_lags(self.filter.to(self.dtype).flip(1), length))
