"""The interpolation of the released SKI code, for models that were trained with it (`ski_interpolation="released"`).

    s_i = i P / (P - 1),    u = min(smallest k with k h >= s_i, R - 2),    a = s_i / h - u
    W_iu = f a,    W_i(u+1) = f (1 - a),    f = lambda^(s_i P)

L length, R inducing points, P = `ski_grid_length`, h = (P - 1)/(R - 1) their distance.

It is not linear interpolation: u is the point after the position, the weights are exchanged, and f fades within a few
positions, so that the low-rank part acts on the first tokens alone. The released code takes the length of each input
for P. Here P is fixed, so that outputs do not depend on padding; they agree for inputs of P positions. Rows beyond P
are zero.
"""

from typing import NamedTuple

import torch

from .numerics import float64_or_widest


def released_weights(length: int, num_points: int, longest: int, decay: float, like: torch.Tensor) -> torch.Tensor:
    """The matrix W, `(L, R)`, in the dtype and on the device of `like`."""
    row = torch.arange(length, device=like.device)[:, None]  # (L, 1)
    # In whole numbers: the released comparison of floating-point numbers is right for exact ones.
    upper = -(-row * longest * (num_points - 1) // (longest - 1) ** 2)
    upper = upper.clamp(max=num_points - 2)  # (L, 1)
    place = row.to(float64_or_widest(like.device)) * longest / (longest - 1)  # (L, 1), s
    share = place * (num_points - 1) / (longest - 1) - upper
    fade = torch.where(row < longest, torch.pow(decay, place * longest), 0)
    weights = place.new_zeros(length, num_points)
    weights = weights.scatter(1, upper, fade * share).scatter(1, upper + 1, fade * (1 - share))
    return weights.to(like.dtype)


class ReleasedGrid(NamedTuple):
    """The inducing points of a sequence, as `tno_ski.InducingGrid`, with the whole matrix W as its only block.

    Attributes:
        length: number of positions L.
        num_points: number of points R, for every length.
        longest: P.
        decay: lambda.
    """

    length: int
    num_points: int
    longest: int
    decay: float
    before = 0

    def blocks(self) -> list[tuple[slice, slice]]:
        """One block of all positions and points."""
        return [(slice(0, self.length), slice(0, self.num_points))]

    def weights(self, positions: slice, points: slice, like: torch.Tensor) -> torch.Tensor:
        """A block of W in the dtype of `like`."""
        return self.matrix(like)[positions, points]

    def matrix(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix W, `(L, R)`."""
        return released_weights(self.length, self.num_points, self.longest, self.decay, like)
