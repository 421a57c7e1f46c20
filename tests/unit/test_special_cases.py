"""What the TNN paper calls special cases of a Toeplitz operator: convolutions (equations 10 to 12), ALiBi (6 to 8)."""

import pytest
import scipy.linalg
import torch
from torch.nn.functional import conv1d, pad
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from helpers.models import random, relative_error, two_sided
from modeling_tnn import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul

SIZES = (1, 2, 17, 40)


def convolved(v: torch.Tensor, filters: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """PyTorch's convolution of `v` `(B, L, D)`, one filter `(K,)` for each channel, padded with zeros."""
    x = pad(v.transpose(1, 2), (left, right))
    return conv1d(x, filters[:, None], groups=len(filters)).transpose(1, 2)


def check(product, expected, inputs):
    """In values and gradients."""
    actual, expected = product(*inputs), expected(*inputs)
    assert relative_error(actual, expected) < 1e-13
    weights = torch.randn_like(actual)
    for one, other in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (actual, expected)), strict=True
    ):
        assert relative_error(one, other) < 1e-13


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_convolutions(size):
    """PyTorch's filters are in the order of the positions, so the last tap of a causal one is that of lag 0.

    With `padding="same"`, an even filter reaches one position further to the right, and lacks a lag.
    """
    left = (size - 1) // 2

    def product(v, filters):
        lags = filters.flip(1)  # from lag -(size - 1 - left) to left
        return toeplitz_matmul(v, pad(lags, (0, size - 1 - 2 * left)))

    for length in (1, 17, 64):
        inputs = [random(2, length, 3), random(3, size)]
        check(
            lambda v, filters: causal_toeplitz_matmul(v, filters.flip(1)),
            lambda v, filters: convolved(v, filters, size - 1, 0),
            inputs,
        )
        check(product, lambda v, filters: convolved(v, filters, left, size - 1 - left), inputs)
        same = conv1d(inputs[0].transpose(1, 2), inputs[1][:, None], groups=3, padding="same")
        assert relative_error(product(*inputs), same.transpose(1, 2)) < 1e-13


@pytest.mark.parametrize("size", SIZES)
def test_full_convolution(size):
    """Equations 12 and 27: the input is padded, and row s of T has h_{s-t}. (Equation 11 has it transposed.)"""
    x, h, length = random(1, 17, 1).detach(), random(1, size).detach(), 17
    y = causal_toeplitz_matmul(pad(x, (0, 0, 0, size - 1)), h)[0, :, 0]
    matrix = torch.from_numpy(scipy.linalg.convolution_matrix(h[0].numpy(), length))
    torch.testing.assert_close(y, matrix @ x[0, :, 0])
    taps = pad(h, (0, length - 1))
    torch.testing.assert_close(dense_toeplitz(two_sided(taps))[0][:, :length], matrix)


@pytest.mark.parametrize("heads", [1, 3])
def test_alibi_is_a_decay_of_the_exponentials(heads):
    """Equations 6 to 8: it multiplies them, entry by entry, with the Toeplitz matrix of lambda^(i - j).

    Without queries and keys: the decayed sum of the values over that of ones, which the softmax divides by.
    """
    length = 33
    bias, rates = alibi(heads, length)
    scores, kernel = random(heads, length, length), rates[:, None] ** torch.arange(length)
    future = ~torch.ones(length, length).tril().bool()
    expected = (scores.exp() * dense_toeplitz(two_sided(kernel))).tril()
    weights = (scores + bias).masked_fill(future, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(weights, expected / expected.sum(dim=-1, keepdim=True))
    weights, v = bias.masked_fill(future, -torch.inf).softmax(dim=-1), random(2, length, heads)  # (H, L, L)
    expected = torch.einsum("hij,bjh->bih", weights, v)
    actual = causal_toeplitz_matmul(v, kernel) / causal_toeplitz_matmul(torch.ones_like(v), kernel)
    assert relative_error(actual, expected) < 1e-13
    assert (weights[:, -1, -1] / weights[:, 0, 0] < 0.7).all(), "so the matrix of the softmax is no Toeplitz matrix"


def alibi(heads: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' bias of each head, `(H, L, L)`, and the rates lambda = exp(m), `(H,)`.

    Its bias grows with the column instead of falling with the distance: rows differ by a constant, which softmax
    does not see. Its slopes are bfloat16 in the model and exact here.
    """
    bias = build_alibi_tensor(torch.ones(1, length), heads, torch.float64)  # (H, 1, L)
    return bias.expand(-1, length, -1), (bias[:, 0, 0] - bias[:, 0, 1]).exp()
