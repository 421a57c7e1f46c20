"""The fast Toeplitz products against dense matrices, values and gradients."""

from functools import partial

import pytest
import scipy.linalg
import torch
from torch import nn
from torch.nn.functional import silu

from helpers.models import random, relative_error
from helpers.products import ProductTests, compare_derivatives, dense_product
from modeling_tnn import causal_toeplitz_matmul, dense_toeplitz, toeplitz_fused, toeplitz_matmul
from modeling_tnn.toeplitz import fit_lags
from modeling_tnn.toeplitz_fused import Gate, activated_product

WAYS = ("fused", "eager")


class TestFused(ProductTests):
    implementation = "fused"


class TestFusedInParts(ProductTests):
    """Several windows at short lengths, and chunks of few channels, the last one shorter."""

    implementation = "fused"

    @pytest.fixture(autouse=True)
    def parts(self, monkeypatch):
        monkeypatch.setattr(toeplitz_fused, "SHORTEST_WINDOW", 8)
        monkeypatch.setattr(toeplitz_fused, "CHUNK", 400)


class TestEager(ProductTests):
    implementation = "eager"


def test_dense_matrix_is_scipys():
    for length in (1, 2, 17):
        coefficients = random(2, 2 * length - 1).detach()
        for channel, matrix in zip(coefficients, dense_toeplitz(coefficients), strict=True):
            column, row = channel[length - 1 :], channel[:length].flip(0)
            torch.testing.assert_close(matrix, torch.from_numpy(scipy.linalg.toeplitz(column, row)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("growth", [1.01, 1.05, 1.3])
def test_rising_kernels_keep_the_digits_of_the_first_outputs(growth, way):
    """A transform rounds by the largest tap: in float32, 0.01 to all digits would depend on the length."""
    kernel = (random(3, 300).detach().clamp(min=-2) * growth ** torch.arange(300)).float().requires_grad_()
    v = random(2, 300, 3).float().detach().requires_grad_()
    whole, start = (causal_toeplitz_matmul(v[:, :length], kernel, way) for length in (300, 40))
    assert relative_error(whole[:, :40], start) < 1e-5
    assert relative_error(whole, dense_product(v.double(), kernel.double())) < 1e-6
    lags = torch.cat([kernel.flip(1)[:, :-1], kernel], dim=1)
    middle, expected = toeplitz_matmul(v, lags, way)[:, 149:151], dense_product(v.double(), lags.double(), 299)
    assert relative_error(middle, expected[:, 149:151]) < 1e-5
    for found, wanted in zip(
        torch.autograd.grad(whole[:, :40].sum(), [v, kernel]),
        torch.autograd.grad(start.sum(), [v, kernel]),
        strict=True,
    ):
        assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_lags_that_are_missing_are_zero_and_lags_beyond_the_sequence_unused(way):
    """In values and gradients."""
    for length in (1, 3, 64, 100):
        v = random(2, length, 3)
        for reach in (1, 4, 100):
            ways = (lambda v, c: toeplitz_matmul(v, c, way), lambda v, c: dense_product(v, c, c.shape[1] // 2))
            compare_derivatives(ways, (v, random(3, 2 * reach - 1)), 1e-12, orders=1)
            ways = (lambda v, k: causal_toeplitz_matmul(v, k, way), dense_product)
            compare_derivatives(ways, (v, random(3, reach)), 1e-12, orders=1)
    lags = fit_lags(random(3, 7), 6)
    assert torch.equal(lags[:, 2:9], random(3, 7)) and not lags[:, [0, 1, 9, 10]].any()


def test_an_activation_with_parameters_learns():
    gradients = []
    for way in WAYS:
        act = nn.PReLU(dtype=torch.float64)
        v, kernel, u = random(2, 9, 3), random(3, 9), random(2, 9, 3)
        y = causal_toeplitz_matmul(v, kernel, way, Gate(u, act)) + activated_product(u, v, act, way)
        y.sum().backward()
        gradients.append(act.weight.grad)
    assert gradients[0].abs().item() > 0
    assert relative_error(*gradients) < 1e-13


def test_a_long_sequence_has_several_windows():
    for length, taps in ((257, 31), (600, 75), (601, 33), (1021, 127)):
        assert toeplitz_fused.windows_of(torch.empty(1, length, 1), torch.empty(1, taps), 0).count > 1


def test_what_is_kept():
    """The inputs, of a gate the mixed values too, and both factors of an activated product."""
    v, kernel, u = (random(*shape, dtype=torch.float32) for shape in ((2, 100, 8), (8, 199), (2, 100, 8)))
    for call, count in (
        (lambda: toeplitz_matmul(v, kernel), 1),
        (lambda: toeplitz_matmul(v, kernel, "fused", Gate(u, silu)), 3),
        (lambda: activated_product(u, v, silu, "fused"), 2),
    ):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            call()
        assert sum(t.nbytes for t in saved if t.shape != kernel.shape) == count * v.nbytes


def test_low_precision_is_rounded_once():
    for dtype in (torch.bfloat16, torch.float16):
        v, kernel, u = random(2, 50, 3).detach().to(dtype), random(3, 50).detach(), random(2, 50, 3).detach().to(dtype)
        exact = causal_toeplitz_matmul(v.double(), kernel, "eager", Gate(u.double(), silu))
        actual = causal_toeplitz_matmul(v, kernel.float(), "fused", Gate(u, silu))
        assert actual.dtype == dtype and relative_error(actual, exact) < torch.finfo(dtype).eps


V, TAPS = torch.ones(2, 5, 3), torch.ones(3, 9)
REFUSED = [
    (toeplitz_matmul, V, torch.ones(3, 10), r"\(3, 9\)"),
    (toeplitz_matmul, V[0], TAPS, r"\(B, L, D\)"),
    (causal_toeplitz_matmul, V, torch.ones(2, 5), "D=3"),
    (causal_toeplitz_matmul, V[:, :0], TAPS, "L >= 1"),
    (partial(toeplitz_matmul, implementation="fast"), V, TAPS, "auto, fused, eager"),
    (toeplitz_matmul, V.long(), TAPS, "`v` must hold real .*, got torch.int64"),
    (toeplitz_matmul, V, TAPS.bool(), "must hold real floating-point numbers, got torch.bool"),
    (causal_toeplitz_matmul, V.cfloat(), TAPS, "`v` must hold real floating-point numbers, got torch.c"),
    (causal_toeplitz_matmul, [[[1.0]]], TAPS, "`v` must be a tensor, got list"),
    (toeplitz_matmul, V, TAPS.to("meta"), "must be on the device of v, cpu, got meta"),
]


def test_refused():
    for function, v, kernel, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            function(v, kernel)
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        dense_toeplitz(torch.ones(3, 4))
