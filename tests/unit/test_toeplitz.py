"""The fast Toeplitz products against dense matrices, values and gradients."""

from functools import partial

import pytest
import scipy.linalg
import torch

from helpers.derivatives import WAYS
from helpers.models import random, relative_error, two_sided
from modeling_tnn import causal_toeplitz_matmul, dense_toeplitz, toeplitz_fused, toeplitz_matmul
from modeling_tnn.numerics import next_fast_len
from modeling_tnn.toeplitz import fit_lags

LENGTHS = [1, 2, 3, 17, 63, 64, 100, 257]


def dense_product(v, coefficients):
    return torch.einsum("dij,bjd->bid", dense_toeplitz(coefficients), v)


def check_against_dense(fast, dense, inputs):
    """Values and gradients of two functions of the same inputs."""
    cotangent = torch.randn(fast(*inputs).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative_error(fast(*inputs), dense(*inputs)) < 1e-13
    fast_gradients = torch.autograd.grad((fast(*inputs) * cotangent).sum(), inputs)
    dense_gradients = torch.autograd.grad((dense(*inputs) * cotangent).sum(), inputs)
    for actual, expected in zip(fast_gradients, dense_gradients, strict=True):
        assert relative_error(actual, expected) < 1e-13


@pytest.mark.parametrize("length", LENGTHS)
def test_dense_matrix_is_scipys(length):
    coefficients = random(2, 2 * length - 1).detach()
    for channel, matrix in zip(coefficients, dense_toeplitz(coefficients), strict=True):
        column, row = channel[length - 1 :], channel[:length].flip(0)
        torch.testing.assert_close(matrix, torch.from_numpy(scipy.linalg.toeplitz(column, row)))


@pytest.fixture(params=[2**18, 50], ids=["one chunk", "chunks of few channels"])
def chunk(request, monkeypatch):
    """So small that seven channels are more than one chunk, the last one shorter."""
    monkeypatch.setattr(toeplitz_fused, "CHUNK", request.param * 8 if request.param < 100 else request.param)


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_two_sided_product(length, product, chunk):
    inputs = (random(2, length, 7), random(7, 2 * length - 1))
    check_against_dense(partial(toeplitz_matmul, implementation=product), dense_product, inputs)


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reach", [1, 4, 100])
def test_two_sided_product_of_another_reach(length, reach, product):
    def dense(v, coefficients):
        return dense_product(v, fit_lags(coefficients, length))

    inputs = (random(2, length, 3), random(3, 2 * reach - 1))
    check_against_dense(partial(toeplitz_matmul, implementation=product), dense, inputs)


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("taps", [1, 5, 64, 300])
def test_causal_product_with_short_and_long_kernels(length, taps, product, chunk):
    def dense(v, kernel):
        return dense_product(v, two_sided(fit_lags(two_sided(kernel), length)[:, length - 1 :]))

    inputs = (random(2, length, 7), random(7, taps))
    check_against_dense(partial(causal_toeplitz_matmul, implementation=product), dense, inputs)


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradient_of_one_input_alone(frozen):
    """A frozen input costs no transform and gets no gradient."""
    inputs = [random(2, 9, 3), random(3, 17)]
    inputs[frozen].requires_grad_(False)
    wanted = inputs[1 - frozen]
    (chunked_gradient,) = torch.autograd.grad(toeplitz_matmul(*inputs).square().sum(), wanted)
    (plain,) = torch.autograd.grad(toeplitz_matmul(*inputs, implementation="eager").square().sum(), wanted)
    assert relative_error(chunked_gradient, plain) < 1e-13


@pytest.mark.parametrize("product", WAYS)
def test_second_derivatives(product):
    v, kernel = random(1, 5, 2), random(2, 5)
    assert torch.autograd.gradgradcheck(partial(causal_toeplitz_matmul, implementation=product), (v, kernel))


def test_chunked_product_keeps_its_inputs_alone():
    saved = []
    v, kernel = random(2, 100, 8, dtype=torch.bfloat16), random(8, 199, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        toeplitz_matmul(v, kernel)
    assert sum(saved) == v.nbytes + kernel.nbytes


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_lower_precision(dtype, tolerance):
    v, coefficients = random(2, 100, 3).detach(), random(3, 199).detach()
    product = toeplitz_matmul(v.to(dtype), coefficients.float())
    assert product.dtype == dtype
    assert relative_error(product, toeplitz_matmul(v, coefficients)) < tolerance


def test_gradcheck():
    for product in WAYS:
        two_sided_product = partial(toeplitz_matmul, implementation=product)
        causal_product = partial(causal_toeplitz_matmul, implementation=product)
        assert torch.autograd.gradcheck(two_sided_product, (random(2, 7, 2), random(2, 13)))
        assert torch.autograd.gradcheck(causal_product, (random(2, 7, 2), random(2, 4)))


def test_transform_lengths():
    for minimum in range(1, 5000):
        length = next_fast_len(minimum)
        assert minimum <= length < 2 * minimum
        for factor in (2, 3, 5):
            while length % factor == 0:
                length //= factor
        assert length == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: toeplitz_matmul(torch.ones(2, 5, 3), torch.ones(3, 10)), "(3, 9)"),
        (lambda: toeplitz_matmul(torch.ones(5, 3), torch.ones(3, 9)), "(B, L, D)"),
        (lambda: causal_toeplitz_matmul(torch.ones(2, 5, 3), torch.ones(2, 5)), "D=3"),
        (lambda: causal_toeplitz_matmul(torch.ones(2, 0, 3), torch.ones(3, 5)), "L >= 1"),
        (lambda: dense_toeplitz(torch.ones(3, 4)), "(3, 4)"),
        (lambda: toeplitz_matmul(torch.ones(2, 5, 3), torch.ones(3, 9), implementation="fast"), "auto, fused, eager"),
    ],
)
def test_wrong_shapes(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


LONG = [(1, 512, 256), (1, 16384, 8), (1, 65536, 8), (2, 65536, 4), (9, 65536, 1)]


@pytest.mark.parametrize(("batch", "length", "expected"), LONG)
def test_long_transforms_are_not_alone(batch, length, expected):
    """A chunk has at least eight; short ones fill 2^18 numbers."""
    size = next_fast_len(2 * length - 1)
    windows = toeplitz_fused.Windows(size, size)
    chosen = toeplitz_fused.chunks(torch.empty(1000, batch, 1).expand(-1, -1, length), windows)
    assert chosen[0] == slice(0, expected) and chosen[-1].stop == 1000
