"""Channel-major linear maps against PyTorch's own. `helpers/products.py` has the gate."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from helpers.models import random
from helpers.products import compare_derivatives
from modeling_tnn.mixers import apply_channel_major
from modeling_tnn.toeplitz import causal_toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate


class Wrapped(nn.Linear):
    """As adapters and quantizers put it in the place of a linear layer."""


@pytest.mark.parametrize("cls", [nn.Linear, Wrapped])
def test_channel_major_linear(cls):
    """Values, and gradients of inputs, weights and biases."""
    layer, ordinary = cls(5, 4).double(), nn.Linear(5, 4).double()
    ordinary.load_state_dict(layer.state_dict())
    for shape in [(2, 7, 5), (1, 1, 5), (3, 1, 5), (7, 5)]:
        x, found = random(*shape), []
        for way, module in ((lambda x: apply_channel_major(layer, x), layer), (ordinary, ordinary)):
            y = way(x)
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, module.weight, module.bias])])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    compare_derivatives((lambda x: apply_channel_major(layer, x), ordinary), (random(2, 7, 5),), orders=2)


@pytest.mark.parametrize("cls", [nn.Linear, Wrapped])
def test_results_lie_channel_by_channel(cls):
    """Through the whole gated unit: no step falls back to the other layout."""
    u = apply_channel_major(cls(5, 4), torch.randn(2, 7, 5))
    y = causal_toeplitz_matmul(u, torch.randn(4, 7), "fused", Gate(u, ACT2FN["silu"]))
    assert u.permute(2, 0, 1).is_contiguous() and y.permute(2, 0, 1).is_contiguous()
    (gradient,) = torch.autograd.grad(y.sum(), u)
    assert gradient.permute(2, 0, 1).is_contiguous()
