"""Gated products and channel-major linear maps against PyTorch's own operations."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from helpers.models import random, relative_error
from modeling_tnn import toeplitz_fused
from modeling_tnn.mixers import apply_channel_major
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate, activated_product

ACTIVATIONS = ["silu", "linear", "relu2", "gelu", "tanh"]


def gated(matmul, act, mask, product, v, kernel, u):
    return matmul(v, kernel, product, Gate(u, ACT2FN[act], mask))


def compare(fast, plain, inputs, tolerance=1e-12):
    """Values, and gradients of a random functional."""
    kept = [x.detach().clone() for x in inputs]
    y, expected = fast(*inputs), plain(*inputs)
    cotangent = random(*y.shape).detach().to(y.dtype)
    assert relative_error(y, expected) < tolerance
    gradients = torch.autograd.grad((y * cotangent).sum(), inputs)
    for actual, wanted in zip(gradients, torch.autograd.grad((expected * cotangent).sum(), inputs), strict=True):
        assert relative_error(actual, wanted) < tolerance
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, kept, strict=True))  # nothing was computed in place


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("length", [1, 2, 17, 63])
def test_gated_product(length, act, masked):
    mask = torch.arange(length).expand(2, length) % 3 != 1 if masked else None
    inputs = (random(2, length, 5), random(5, 2 * length - 1), random(2, length, 5) * 0.9)
    ways = [partial(gated, toeplitz_matmul, act, mask, product) for product in ("fused", "eager")]
    compare(*ways, inputs)


@pytest.mark.parametrize("length, taps", [(257, 1), (257, 31), (600, 3), (600, 75), (1021, 33), (1021, 127)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_of_a_long_sequence(length, taps, causal):
    """Several transforms instead of one (overlap-save), with the gate and the mask around them."""
    matmul, mask = (
        causal_toeplitz_matmul if causal else toeplitz_matmul,
        torch.arange(length).expand(2, -1) % 5 > 0,
    )
    assert toeplitz_fused.windows_of(torch.empty(1, length, 1), torch.empty(1, taps), 0).count > 1
    inputs = (random(2, length, 3), random(3, taps), random(2, length, 3) * 0.9)
    compare(*[partial(gated, matmul, "silu", mask, product) for product in ("fused", "eager")], inputs)


def test_gradcheck():
    inputs = (random(2, 9, 2), random(2, 4), random(2, 9, 2) * 0.9)
    assert torch.autograd.gradcheck(partial(gated, causal_toeplitz_matmul, "silu", None, "fused"), inputs)
    assert torch.autograd.gradcheck(lambda a, b: activated_product(a, b, ACT2FN["silu"], "fused"), inputs[::2])


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient(frozen):
    inputs = [random(2, 9, 2), random(2, 4), random(2, 9, 2)]
    inputs[frozen].requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    gradients = [
        torch.autograd.grad(gated(causal_toeplitz_matmul, "silu", None, product, *inputs).square().sum(), wanted)
        for product in ("fused", "eager")
    ]
    for actual, expected in zip(*gradients, strict=True):
        assert relative_error(actual, expected) < 1e-13


def test_an_activation_with_parameters_learns():
    gradients = []
    for product in ("fused", "eager"):
        act = nn.PReLU(dtype=torch.float64)
        v, kernel, u = random(2, 9, 3), random(3, 9), random(2, 9, 3)
        (
            causal_toeplitz_matmul(v, kernel, product, Gate(u, act)) + activated_product(u, v, act, product)
        ).sum().backward()
        gradients.append(act.weight.grad)
    assert gradients[0].abs().item() > 0
    assert relative_error(*gradients) < 1e-13


def test_what_is_kept():
    """Besides the filter: u, v and the mixed values of a gated product, both factors of an activated one."""
    v, kernel, u = (random(*shape, dtype=torch.float32) for shape in ((2, 100, 8), (8, 50), (2, 100, 8)))
    for call, count in (
        (lambda: causal_toeplitz_matmul(v, kernel, "fused", Gate(u, ACT2FN["silu"])), 3),
        (lambda: activated_product(u, v, ACT2FN["silu"], "fused"), 2),
    ):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            call()
        assert sum(t.nbytes for t in saved if t.shape != kernel.shape) == count * v.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_in_low_precision_is_computed_in_float32(dtype):
    v, kernel, u = random(2, 50, 3).detach(), random(3, 50).detach(), random(2, 50, 3).detach()
    v, u = v.to(dtype), u.to(dtype)
    exact = gated(causal_toeplitz_matmul, "silu", None, "eager", v.double(), kernel, u.double())
    actual = gated(causal_toeplitz_matmul, "silu", None, "fused", v, kernel.float(), u)
    assert actual.dtype == dtype
    assert relative_error(actual, exact) < torch.finfo(dtype).eps  # one rounding, of the result


class Wrapped(nn.Linear):
    """As adapters and quantizers put it in the place of a linear layer."""


@pytest.mark.parametrize("cls", [nn.Linear, Wrapped])
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 1, 5), (3, 1, 5), (7, 5)])
def test_channel_major_linear(shape, cls):
    layer, ordinary = cls(5, 4).double(), nn.Linear(5, 4).double()
    ordinary.load_state_dict(layer.state_dict())
    x = random(*shape)
    compare(partial(apply_channel_major, layer), ordinary, (x,))
    for y in (apply_channel_major(layer, x), ordinary(x)):
        y.square().sum().backward()
    assert relative_error(layer.weight.grad, ordinary.weight.grad) < 1e-13
    assert relative_error(layer.bias.grad, ordinary.bias.grad) < 1e-13


@pytest.mark.parametrize("cls", [nn.Linear, Wrapped])
def test_results_lie_channel_by_channel(cls):
    """Through the whole gated unit: no step falls back to the other layout."""
    u = apply_channel_major(cls(5, 4), torch.randn(2, 7, 5))
    y = causal_toeplitz_matmul(u, torch.randn(4, 7), "fused", Gate(u, ACT2FN["silu"]))
    assert u.permute(2, 0, 1).is_contiguous() and y.permute(2, 0, 1).is_contiguous()
    (gradient,) = torch.autograd.grad(y.sum(), u)
    assert gradient.permute(2, 0, 1).is_contiguous()
