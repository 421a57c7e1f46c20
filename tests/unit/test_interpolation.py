"""Blocks of the interpolation matrix against the whole of it."""

import pytest
import torch

from helpers.models import random, relative_error
from helpers.products import compare_derivatives
from modeling_tnn import tno_ski
from modeling_tnn.tno_ski import INTERPOLATIONS, InducingGrid, Prolong, Restrict

GRIDS = [(1, 1, 1), (2, 1, 1), (63, 5, 62), (64, 31, 63), (300, 63, 511), (700, 31, 511)]


@pytest.mark.parametrize(("kind", "rows"), [*zip(INTERPOLATIONS, (2, 512), strict=True)])
def test_products_are_those_of_the_matrix(kind, rows, monkeypatch):
    """With derivatives of three orders, and against differences."""
    monkeypatch.setattr(tno_ski, "ROWS", rows)
    for sizes in GRIDS:
        grid = InducingGrid(*sizes, kind)
        x, base = random(3, grid.length), random(3, grid.length)
        weights, z = grid.matrix(x), random(3, grid.num_points)
        assert relative_error(Restrict.apply(x, grid), x @ weights) < 1e-14
        assert relative_error(Prolong.apply(z, None, grid), z @ weights.t()) < 1e-14
        assert relative_error(Prolong.apply(z, base, grid), z @ weights.t() + base) < 1e-14
        ways = (
            lambda z, x, g=grid: Prolong.apply(z.sin() * Restrict.apply(x.sin(), g), x, g),
            lambda z, x, w=weights: (z.sin() * (x.sin() @ w)) @ w.t() + x,
        )
        if grid.length <= 64:
            compare_derivatives(ways, (z, x))
    grid = InducingGrid(7, 3, 6, kind)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: Restrict.apply(x, grid).sin(), (random(1, 7),))
        assert check(lambda z, x: Prolong.apply(z, x, grid).sin(), (random(1, grid.num_points), random(1, 7)))


@pytest.mark.parametrize("kind", INTERPOLATIONS)
def test_weights_interpolate(kind):
    """Exactly for polynomials of degree 1 and 3, from two and four points, and the points reach the last position."""
    for sizes in GRIDS:
        grid = InducingGrid(*sizes, kind)
        weights = grid.matrix(torch.zeros(1, dtype=torch.float64))
        degree, around = {"linear": (1, 2), "cubic": (3, 4)}[kind]
        assert ((weights.abs() > 1e-12).sum(1) <= around).all()
        assert (
            weights[-1, grid.before :].any() and not weights[:, grid.num_points - 2 * grid.before :].abs().gt(1).any()
        )
        points = torch.arange(grid.num_points, dtype=torch.float64) - grid.before
        positions = torch.arange(grid.length, dtype=torch.float64) * grid.intervals / grid.steps
        assert points[-1] - grid.before >= positions[-1] > points[-1] - grid.before - 1
        for power in range(degree + 1):
            torch.testing.assert_close(weights @ points**power, positions**power)


def test_a_shorter_text_has_the_weights_of_a_longer_one():
    """So padding changes nothing."""
    grid = InducingGrid(300, 63, 511, "cubic")
    whole = grid.matrix(torch.zeros(1, dtype=torch.float64))
    for length in (1, 2, 17, 200):
        part = grid._replace(length=length).matrix(whole)
        assert torch.equal(part, whole[:length, : part.shape[1]]) and not whole[:length, part.shape[1] :].any()
