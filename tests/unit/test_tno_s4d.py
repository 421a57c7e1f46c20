"""The operators `s4d`, the diagonal state-space model, and `exponential`, real exponentials."""

import math

import numpy as np
import pytest
import torch
from scipy.signal import cont2discrete

from helpers.models import random, relative_error, seeded, tiny_config
from helpers.operators import OperatorTests, advance, random_input, random_operator
from modeling_tnn import tno_modal, tno_s4d
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_s4d import DISCRETIZATIONS, INITIAL_MODES, VandermondeProduct, vandermonde_product
from modeling_tnn.toeplitz import Pair


def naive_vandermonde_product(real, imag, rate, angle, length: int, dtype: torch.dtype) -> torch.Tensor:
    """`vandermonde_product` by its definition, with the whole matrix `(D, Q, L)`."""
    pole = torch.exp(torch.complex(-rate, angle))  # (D, Q)
    matrix = pole[..., None] ** torch.arange(length, device=pole.device)  # (D, Q, L)
    return (torch.complex(real, imag)[:, None] @ matrix)[:, 0].real


class TestS4d(OperatorTests):
    tno_type = "s4d"


class TestExponential(OperatorTests):
    tno_type = "exponential"


@pytest.mark.parametrize("causal", [True, False])
def test_exponentials_are_their_definition(causal):
    """Sums of r exp(p k), in values and gradients. At the start all have the same energy, up to the trained length."""
    operator, length = random_operator("exponential", causal), 37
    poles, residues, lags = operator.log_poles, operator.residues, torch.arange(length, dtype=torch.float64)
    taps = (residues[..., None] * torch.exp(poles[..., None] * lags)).sum(1)  # (D, L) or (2D, L)
    positive, negative = taps[: operator.channels], taps[operator.channels :]
    expected = positive if causal else torch.cat([negative[:, :-1].flip(1), positive], dim=1)
    found = operator.coefficients(length)
    assert relative_error(found, expected) < 1e-12
    cotangent = torch.arange(found.numel(), dtype=torch.float64).cos().view(found.shape)
    wanted, gradients = (torch.autograd.grad((k * cotangent).sum(), (poles, residues)) for k in (expected, found))
    assert all(relative_error(a, b) < 1e-11 for a, b in zip(gradients, wanted, strict=True))
    operator.reset_parameters()
    constants = -1 / operator.log_poles[0]
    assert constants[0] == 1 and constants[-1].item() == pytest.approx(64)


@torch.no_grad()
@pytest.mark.parametrize("log_pole", [0.0, 0.01])
def test_a_long_prompt_of_an_exponential_that_does_not_decay(log_pole, monkeypatch):
    for name in ("PIECE", "LONG_PROMPT"):
        monkeypatch.setattr(tno_modal, name, 16)
    operator, layer = random_operator("exponential", True), TnnCacheLayer()
    operator.log_poles.fill_(log_pole)
    v = random_input(2, 90, operator.channels)
    found = torch.cat([advance(layer, part, operator) for part in v.split([80, 1, 9], dim=1)], dim=1)
    assert relative_error(found, operator(v)) < 1e-11


def random_modes(discretization: str, filters=3, modes=5) -> tuple[list, tuple]:
    """Leaves, and the poles and weights that follow from them."""
    real, imag, weights = random(filters, modes), random(filters, modes + 1), random(2, filters, modes)
    alpha = Pair(-real.exp(), 9 * imag[:, :modes])
    poles, _ = DISCRETIZATIONS[discretization](alpha, torch.full((filters, 1), 0.3, dtype=torch.float64))
    return [real, imag, weights], (Pair(*weights), poles)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_powers_are_the_definition(discretization, traced, monkeypatch):
    """In values and gradients, of the fused product, and with the block of recorded graphs.

    `test_derivatives.py` has those of higher order.
    """
    monkeypatch.setattr(tno_s4d, "is_traced", lambda: traced)
    for length in (1, 2, 3, 17, 63, 64, 65, 150):
        found = []
        for product in (naive_vandermonde_product, vandermonde_product, VandermondeProduct.apply):
            leaves, (weights, poles) = random_modes(discretization)
            values = product(*weights, *poles, length, torch.float64)  # (D, L)
            cotangent = torch.arange(values.numel(), dtype=torch.float64).cos().view(values.shape)
            found.append([values, *torch.autograd.grad((values * cotangent).sum(), leaves)])
        for expected, *others in zip(*found, strict=True):
            assert all(relative_error(actual, expected) < 1e-11 for actual in others), length


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_of_a_system(causal, discretization):
    """By scipy's discretisation and powers of its matrix: 2 Re C A^k B, and D at lag 0."""
    operator = random_operator("s4d", causal, hidden_size=2, s4d_discretization=discretization)
    sides = []
    for filter_index in range(len(operator.imag)):
        row = (operator.log_real, operator.imag, operator.weights)
        real, imag, weights = (part[filter_index].detach().numpy() for part in row)
        eye, ones, step = np.eye(len(real)), np.ones((len(real), 1)), operator.log_step[filter_index].exp().item()
        system = (np.diag(-np.exp(real) + 1j * imag), ones, eye, 0 * ones)
        transition, given, *_ = cont2discrete(system, step, method=discretization)
        states = [np.linalg.matrix_power(transition, k) @ given[:, 0] for k in range(20)]
        sides.append([2 * ((weights[:, 0] + 1j * weights[:, 1]) @ state).real for state in states])
    positive, negative = np.array(sides[:4]), np.array(sides[4:])
    positive[:, 0] += operator.direct.detach().numpy()
    expected = positive if causal else np.concatenate([negative[:, :19][:, ::-1], positive], axis=1)
    assert relative_error(operator.coefficients(20), torch.tensor(expected)) < 1e-12


def test_a_pole_at_zero():
    """Only (1 + Delta alpha / 2) of the bilinear rule can be 0: then the kernel ends after its first tap."""
    poles, gain = DISCRETIZATIONS["bilinear"](Pair(-torch.ones(1, 1).double(), torch.zeros(1, 1).double()),
                                              torch.full((1, 1), 2.0).double())  # fmt: skip
    kernel = vandermonde_product(*gain, *poles, 5, torch.float64)
    assert (kernel[0] - torch.tensor([1.0, 0, 0, 0, 0])).abs().max() < 1e-100


@pytest.mark.parametrize("size", [2, 64])
def test_first_poles(size):
    """Lin and Inv by the formulas of the paper, LegS by its matrix."""
    n = np.arange(size // 2)
    expected = {"lin": np.pi * n, "inv": size / np.pi * (size / (2 * n + 1) - 1)}
    row, column = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    hippo = np.where(row > column, -np.sqrt((2 * row + 1.0) * (2 * column + 1)), 0) - np.diag(np.arange(size) + 1.0)
    low_rank = np.sqrt(np.arange(size) + 0.5)
    normal = hippo + np.outer(low_rank, low_rank)
    values, vectors = np.linalg.eig(normal)
    order = np.argsort(values.imag)[size // 2 :]
    expected["legs"] = values.imag[order]
    for name, frequencies in expected.items():
        imag, scale = INITIAL_MODES[name](size)
        assert np.allclose(imag.numpy(), frequencies, rtol=1e-9, atol=1e-9), name
    assert np.allclose(values.real, -0.5)
    inputs = np.linalg.inv(vectors) @ np.sqrt(2 * np.arange(size) + 1.0)
    assert np.allclose(scale.numpy(), np.abs(inputs[order]), rtol=1e-6), "the input weights of S4D-LegS"


@pytest.mark.parametrize("initializer", INITIAL_MODES)
def test_initialization(initializer):
    config = tiny_config("s4d", hidden_size=400, s4d_initializer=initializer, s4d_dt_min=0.01, s4d_dt_max=0.2)
    operator = seeded(build_tno, config)
    operator.reset_parameters()
    imag, scale = INITIAL_MODES[initializer](6)
    assert torch.allclose(operator.log_real.exp(), torch.tensor(0.5), rtol=1e-6)
    assert relative_error(operator.imag, imag.expand(800, 3).float()) < 1e-6
    steps = operator.log_step.exp()
    assert 0.01 <= steps.min() < 0.011 and 0.18 < steps.max() <= 0.2
    assert abs(operator.log_step.mean() - math.log(0.01 * 0.2) / 2) < 0.1
    power = operator.weights.square().sum(-1).mean(0)
    assert (power / scale.square() - 1).abs().max() < 0.15, "complex numbers of variance 1"


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_all_parameters_are_stable(discretization):
    """No constraint and no projection: the poles lie inside the circle, whatever the parameters are."""
    operator = random_operator("s4d", True, s4d_discretization=discretization)
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.mul_(50)
    assert operator.powers(torch.ones(1)).abs().max() < 1
    assert operator.coefficients(3000).isfinite().all()
