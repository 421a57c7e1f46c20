"""The fast Toeplitz products against dense matrices, values and gradients."""

import pytest
import scipy.linalg
import torch
from conftest import relative_error

from modeling_tnn import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul
from modeling_tnn.toeplitz import fft_length, fit_lags, two_sided

LENGTHS = [1, 2, 3, 17, 63, 64, 100, 257]


def random(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


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


@pytest.mark.parametrize("length", LENGTHS)
def test_two_sided_product(length):
    inputs = (random(2, length, 3), random(3, 2 * length - 1))
    check_against_dense(toeplitz_matmul, dense_product, inputs)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("taps", [1, 5, 64, 300])
def test_causal_product_with_short_and_long_kernels(length, taps):
    def dense(v, kernel):
        return dense_product(v, two_sided(fit_lags(two_sided(kernel), length)[:, length - 1 :]))

    check_against_dense(causal_toeplitz_matmul, dense, (random(2, length, 3), random(3, taps)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_lower_precision(dtype, tolerance):
    v, coefficients = random(2, 100, 3).detach(), random(3, 199).detach()
    product = toeplitz_matmul(v.to(dtype), coefficients.float())
    assert product.dtype == dtype
    assert relative_error(product, toeplitz_matmul(v, coefficients)) < tolerance


def test_gradcheck():
    assert torch.autograd.gradcheck(toeplitz_matmul, (random(2, 7, 2), random(2, 13)))
    assert torch.autograd.gradcheck(causal_toeplitz_matmul, (random(2, 7, 2), random(2, 4)))


def test_transform_lengths():
    for minimum in range(1, 5000):
        length = fft_length(minimum)
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
    ],
)
def test_wrong_shapes(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
