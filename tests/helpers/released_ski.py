"""The interpolation matrix of the released SKI, which is not linear interpolation, and an operator that uses it."""

from typing import NamedTuple

import torch

from modeling_tnn.tno_ski import SkiOperator


def released_interpolation(length: int, rank: int, decay: float) -> torch.Tensor:
    """The matrix of the released code, `(n, r)`, in float64."""
    nodes = torch.arange(rank, dtype=torch.float64) * (length - 1) / (rank - 1)
    queries = torch.arange(length, dtype=torch.float64) * length / (length - 1)
    index = torch.searchsorted(nodes, queries).clamp(max=rank - 2)
    offset = (queries - nodes[index]) * (rank - 1) / (length - 1)
    scale = decay ** (queries * length)
    weights = torch.zeros(length, rank, dtype=torch.float64)
    rows = torch.arange(length)
    weights[rows, index] = scale * offset
    weights[rows, index + 1] = scale * (1 - offset)
    return weights


class ReleasedGrid(NamedTuple):
    """The grid of an operator with all of the released matrix as its only block."""

    length: int
    num_points: int
    decay: float

    def blocks(self):
        return [(slice(0, self.length), slice(0, self.num_points))]

    def weights(self, positions, points, like):
        return released_interpolation(self.length, self.num_points, self.decay).to(like)


def use_released_interpolation(module: torch.nn.Module, monkeypatch):
    monkeypatch.setattr(SkiOperator, "grid", lambda self, n: ReleasedGrid(n, self.rank, self.decay))
    return module
