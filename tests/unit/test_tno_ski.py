"""The operator `ski`: the sparse plus low-rank operator, and blocks of its interpolation against the matrix."""

import math

import pytest
import torch

from helpers.models import random, relative_error, seeded, tiny_config
from helpers.operators import OperatorTests, random_operator
from helpers.products import compare_derivatives
from modeling_tnn import numerics, tno_ski
from modeling_tnn.configuration_tnn import CHOICES
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_ski import InducingGrid, Prolong, ReleasedGrid, Restrict
from modeling_tnn.toeplitz import dense_toeplitz


class TestSki(OperatorTests):
    tno_type = "ski"


class TestReleasedSki(OperatorTests):
    tno_type = "ski"
    fields = {"ski_interpolation": "released"}


def released_interpolation(length: int, rank: int, decay: float) -> torch.Tensor:
    """The matrix of the released code, `(n, r)`, in float64, which is not linear interpolation."""
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


@pytest.mark.parametrize(("length", "rank", "decay"), [(2, 2, 0.9), (9, 4, 0.999), (64, 17, 0.99999), (65, 64, 1.0)])
def test_released_interpolation(length, rank, decay):
    """The matrix of the released code; of a shorter text its first rows, of a longer one no further rows."""
    expected = released_interpolation(length, rank, decay)
    for positions in (1, length, length + 3):
        found = ReleasedGrid(positions, rank, length, decay).matrix(expected)
        assert relative_error(found[:length], expected[:positions]) < 1e-12
        assert not found[length:].any()


def initial_operator(**fields):
    operator = seeded(build_tno, tiny_config("ski", False, ski_filter_size=16, hidden_size=512, **fields))
    operator.reset_parameters()
    return operator


def test_local_start():
    """A filter of norm 1 and no low-rank part, which training reaches nevertheless."""
    operator = initial_operator(ski_initializer="local")
    reach = operator.filter.shape[1] // 2
    assert operator.filter.square().sum(1).mean().item() == pytest.approx(1, abs=0.05)
    kernel = operator.coefficients(64)
    assert kernel[:, 63 - reach : 64 + reach].all() and not kernel[:, : 63 - reach].any()
    assert not kernel[:, 64 + reach :].any()
    operator(torch.randn(1, 64, operator.channels)).square().sum().backward()
    assert all(values.grad.any(dim=1).all() for values in (operator.alphas, operator.betas))


def exponential(rank: int):
    """An operator whose kernel is 0.98^|lag|, for 193 positions."""
    fields = {"ski_rank": rank, "max_position_embeddings": 193, "ski_decay": 0.98}
    operator = random_operator("ski", False, **fields)
    ramp = torch.arange(1, rank + 1, dtype=torch.float64) / rank
    with torch.no_grad():
        operator.alphas.copy_(ramp)
        operator.betas.copy_(ramp.flip(0))
    return operator


def interpolation_error(operator) -> torch.Tensor:
    return (operator.dense(193) - dense_toeplitz(operator.coefficients(193))).detach()[0]


def test_order_of_the_interpolation():
    """The error falls with the square of the distance of the points where the kernel is smooth, away from lag 0."""
    errors, lags = [], torch.arange(193)[:, None] - torch.arange(193)
    for rank in (25, 49, 97, 193):  # 8, 4, 2 and 1 positions apart
        difference = interpolation_error(exponential(rank)).abs()
        errors.append(difference[lags.abs() >= 32].max().item())
    assert errors[3] < 1e-13, "a point at each position"
    for coarse, fine in zip(errors, errors[1:3], strict=False):
        assert 1.8 < math.log2(coarse / fine) < 2.2


@pytest.mark.parametrize("largest", [0, 10**6])
@pytest.mark.parametrize("kind", CHOICES["ski_interpolation"])
def test_on_an_accelerator(kind, largest, monkeypatch):
    """With the matrix of the interpolation or, where it would be too large, in blocks."""
    operator = random_operator("ski", False, ski_interpolation=kind)
    monkeypatch.setattr(tno_ski, "LARGEST_MATRIX", largest)
    for length in (1, 2, 17, 201):
        v = torch.randn(2, length, operator.channels, dtype=torch.float64, requires_grad=True)
        results = []
        for hosts in (("cpu",), ()):
            monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
            y = operator(v)
            results.append([y, *torch.autograd.grad(y.square().sum(), [v, *operator.parameters()])])
        for found, expected in zip(*results, strict=True):
            assert relative_error(found, expected) < 1e-12, length


GRIDS = [(1, 1, 1), (2, 1, 1), (63, 5, 62), (64, 31, 63), (300, 63, 511), (700, 31, 511)]


@pytest.mark.parametrize("rows", [2, 512])
def test_products_are_those_of_the_matrix(rows, monkeypatch):
    """With derivatives of three orders, and against differences."""
    monkeypatch.setattr(tno_ski, "ROWS", rows)
    for sizes in GRIDS:
        grid = InducingGrid(*sizes)
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
    grid = InducingGrid(7, 3, 6)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: Restrict.apply(x, grid).sin(), (random(1, 7),))
        assert check(lambda z, x: Prolong.apply(z, x, grid).sin(), (random(1, grid.num_points), random(1, 7)))


def test_weights_interpolate():
    """Exactly for lines, from two points, and the points reach the last position."""
    for sizes in GRIDS:
        grid = InducingGrid(*sizes)
        weights = grid.matrix(torch.zeros(1, dtype=torch.float64))
        assert ((weights > 1e-12).sum(1) <= 2).all() and weights[-1].any()
        points = torch.arange(grid.num_points, dtype=torch.float64)
        positions = torch.arange(grid.length, dtype=torch.float64) * grid.intervals / grid.steps
        assert points[-1] >= positions[-1] > points[-1] - 1
        for power in (0, 1):
            torch.testing.assert_close(weights @ points**power, positions**power)


def test_weights_of_a_million_positions():
    """In float32 as in float64, and the kernel there too, which a rounded lambda to that power would miss by 1%."""
    for grid in (InducingGrid(10**6, 1023, 2047), InducingGrid(10**6, 63, 511)):
        *_, block = grid.blocks()
        found, expected = (
            grid.weights(*block, torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)
        )
        assert (found - expected).abs().max() < 1e-6
    operator = random_operator("ski", False, ski_decay=1 - 1e-6)
    lags = torch.tensor([-(10.0**6), -1e5, 1e5, 1e6], dtype=torch.float64)
    expected = operator.warped_kernel(lags)
    assert relative_error(operator.float().warped_kernel(lags.float()), expected) < 1e-6
