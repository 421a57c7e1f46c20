"""The interpolation matrix of the released SKI, which is not linear interpolation, written as its code does it."""

import torch


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
