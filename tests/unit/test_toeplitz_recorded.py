"""The convolution as one node of a compiled graph: no break, the values of the uncompiled code, any length."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.models import random, relative_error
from helpers.products import ProductTests
from modeling_tnn.compile.product import convolution, convolution_gradients, gated_recorded
from modeling_tnn.toeplitz import causal_toeplitz_matmul, gated_convolution, toeplitz_matmul
from modeling_tnn.toeplitz_fused import NO_GATE


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, dynamic=None):
    """A function in one graph, and the graphs that it needs."""
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), backend


def assert_same(actual, expected, tolerance=2e-6):
    assert max(relative_error(a, b) for a, b in zip(actual, expected, strict=True)) < tolerance


def test_eager_is_recorded_as_it_is():
    """Whoever wants PyTorch's own operations in the graph says so."""
    call, backend = compiled(lambda v, kernel: causal_toeplitz_matmul(v, kernel, "eager"))
    v, kernel = random(2, 30, 3), random(3, 9)
    torch.testing.assert_close(call(v, kernel), causal_toeplitz_matmul(v, kernel))
    names = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert any("fft" in name for name in names) and not any("modeling_tnn" in name for name in names)


class TestRecorded(ProductTests):
    """The custom operator itself; graphs hold no derivatives of derivatives."""

    tolerances = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
    orders = 1
    transforms = ()

    def product(self, v, kernel, first=0, gate=NO_GATE):
        return gated_recorded(v, kernel, first, gate, "fused")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "response"])
def test_products_in_a_graph(kind, dtype):
    """Of every kind, with taps shorter and longer than the text."""
    filtered = partial(gated_convolution, first=0)
    matmul = {"causal": causal_toeplitz_matmul, "bidirectional": toeplitz_matmul, "response": filtered}[kind]
    kernel_dtype = torch.promote_types(dtype, torch.float32)
    shapes = [(2, 3, 33)] if kind == "response" else [(3, 9), (3, 201)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2)
    for shape in shapes:
        v, kernel = random(2, 30, 3, dtype=dtype).detach(), random(*shape, dtype=kernel_dtype).detach()
        inputs = (v.requires_grad_(), kernel.requires_grad_())
        found = []
        for call in (compiled(matmul)[0], matmul):
            y = call(*inputs)
            assert y.dtype == dtype
            found.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
        assert_same(*found, tolerance)


@pytest.mark.parametrize("shape", [(3, 2, 30), (1, 1, 3)])
def test_operators(shape):
    """PyTorch's own checks: schema, fake tensors, gradients, and graphs of any shape."""
    x, kernel = torch.randn(shape, dtype=torch.float64), torch.randn(shape[0], 5, dtype=torch.float64)
    for tensor, taps in ((x, kernel), (x.permute(1, 2, 0).contiguous().permute(2, 0, 1), kernel.t().contiguous().t())):
        arguments = (tensor.detach().requires_grad_(), taps.detach().requires_grad_(), 2, None, "fused")
        torch.library.opcheck(convolution, arguments)
        for wanted in ([True, True], [True, False], [False, True]):
            given = (tensor, tensor, taps, 2, None, "fused", wanted)
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(convolution_gradients, given, test_utils=tests)
