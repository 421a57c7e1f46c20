"""Blocks of the interpolation matrix against the whole of it."""

import pytest
import torch

from helpers.models import random, relative_error
from modeling_tnn import tno_ski
from modeling_tnn.tno_ski import InducingGrid, Prolong, Restrict

GRIDS = [
    InducingGrid(1, 1, 1),
    InducingGrid(2, 1, 1),
    InducingGrid(63, 5, 62),
    InducingGrid(64, 31, 63),
    InducingGrid(300, 63, 511),
    InducingGrid(700, 31, 511),
]


@pytest.mark.parametrize("rows", [2, 512])
@pytest.mark.parametrize("grid", GRIDS)
def test_products_are_those_of_the_matrix(grid, rows, monkeypatch):
    monkeypatch.setattr(tno_ski, "ROWS", rows)
    x, base = random(3, grid.length), random(3, grid.length)
    weights = grid.matrix(x)
    z = random(3, grid.num_points)
    assert relative_error(Restrict.apply(x, grid), x @ weights) < 1e-14
    assert relative_error(Prolong.apply(z, None, grid), z @ weights.t()) < 1e-14
    assert relative_error(Prolong.apply(z, base, grid), z @ weights.t() + base) < 1e-14


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_interpolate(grid):
    """Each position has weights of sum 1 on the two points around it, and the points reach the last position."""
    weights = grid.matrix(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(1), torch.ones(grid.length, dtype=torch.float64))
    assert (weights.count_nonzero(dim=1) <= 2).all()
    assert weights[-1, -1] > 0
    points = torch.arange(grid.num_points, dtype=torch.float64)
    positions = torch.arange(grid.length, dtype=torch.float64)
    torch.testing.assert_close(weights @ points, positions * grid.intervals / grid.steps)


def test_gradients():
    grid = InducingGrid(30, 20, 29)
    x, z, base = random(2, 30), random(2, grid.num_points), random(2, 30)
    assert torch.autograd.gradcheck(lambda x: Restrict.apply(x, grid), (x,))
    assert torch.autograd.gradcheck(lambda z, base: Prolong.apply(z, base, grid), (z, base))
    assert torch.autograd.gradgradcheck(lambda x: Restrict.apply(x, grid).square(), (x,))
