"""Linear interpolation between equally spaced points, and its adjoint, without the matrix. No parameters here.

    W_ik = max(0, 1 - |i / h - k|),        prolong: z W^T,    restrict: x W

L positions i, K points k that lie h positions apart, M rows. A position has two points at most, so W is nearly empty:
positions are taken in blocks of a few points' length, each one small dense product, and memory does not grow with L K.
The results of `restrict` are laid out point by point, for some rows at a time (measured at L = 2048, K = 64, M = 6144:
0.4 times the time of the full product; row by row, 1.2 times).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .tracing import is_transformed

# Points in a block, and rows at a time.
BLOCK = 8
ROWS = 512


def hat_weights(positions: torch.Tensor, num_points: int) -> torch.Tensor:
    """Linear interpolation between the values at 0, 1, .., `num_points` - 1, as a matrix.

    Args:
        positions: `(M,)`, where to evaluate, in [0, num_points - 1].

    Returns:
        `(M, num_points)`.
    """
    points = torch.arange(num_points, device=positions.device, dtype=positions.dtype)
    return (1 - (positions[:, None] - points).abs()).clamp(min=0)


class Grid(NamedTuple):
    """Points over a sequence.

    Attributes:
        length: L.
        intervals, steps: `intervals` times h are `steps` positions.
    """

    length: int
    intervals: int
    steps: int

    @property
    def num_points(self) -> int:
        """K, the fewest that reach the last position."""
        return ((self.length - 1) * self.intervals + self.steps - 1) // self.steps + 1

    def position(self, point: int) -> int:
        """The first position that is not before `point`."""
        return -(-point * self.steps // self.intervals)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Positions, and the points that they lie between."""
        for point in range(0, self.num_points, BLOCK):
            start, stop = self.position(point), min(self.position(point + BLOCK), self.length)
            if start < stop:
                yield slice(start, stop), slice(point, min(point + BLOCK + 1, self.num_points))

    def weights(self, positions: slice, points: slice, like: torch.Tensor) -> torch.Tensor:
        """A block of W in the dtype of `like`."""
        index = torch.arange(positions.start, positions.stop, device=like.device, dtype=like.dtype)
        return hat_weights(index * self.intervals / self.steps - points.start, points.stop - points.start)

    def matrix(self, like: torch.Tensor) -> torch.Tensor:
        """W, `(L, K)`: the oracle of the products."""
        return self.weights(slice(0, self.length), slice(0, self.num_points), like)


class Restrict(torch.autograd.Function):
    """x W, `(M, L)` to `(M, K)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, grid: Grid) -> torch.Tensor:
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
        return prolong(gradient, None, ctx.grid), None


class Prolong(torch.autograd.Function):
    """base + z W^T, `(M, K)` to `(M, L)`; base `(M, L)` or None."""

    @staticmethod
    def forward(ctx, z: torch.Tensor, base: torch.Tensor | None, grid: Grid) -> torch.Tensor:
        ctx.grid = grid
        x = z.new_empty(len(z), grid.length)
        for positions, points in grid.blocks():
            weights = grid.weights(positions, points, z).t()
            if base is None:
                torch.mm(z[:, points], weights, out=x[:, positions])
            else:
                torch.addmm(base[:, positions], z[:, points], weights, out=x[:, positions])
        return x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return restrict(gradient, ctx.grid), gradient if ctx.needs_input_grad[1] else None, None


def restrict(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x W, `(M, L)` to `(M, K)`."""
    return x @ grid.matrix(x) if is_transformed(x) else Restrict.apply(x, grid)


def prolong(z: torch.Tensor, base: torch.Tensor | None, grid: Grid) -> torch.Tensor:
    """base + z W^T, `(M, K)` to `(M, L)`; base `(M, L)` or None."""
    if not is_transformed(z):
        return Prolong.apply(z, base, grid)
    x = z @ grid.matrix(z).t()
    return x if base is None else base + x
