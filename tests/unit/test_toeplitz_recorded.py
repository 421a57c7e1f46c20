"""The convolution as one node of a compiled graph: no break, the values of the uncompiled code, any length."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.models import VARIANTS, exhaustive, random, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.compile import product as recorded
from modeling_tnn.compile.product import convolution, convolution_gradients
from modeling_tnn.kernels import choice
from modeling_tnn.toeplitz import causal_toeplitz_matmul, gated_convolution, toeplitz_matmul
from modeling_tnn.toeplitz_fused import fused_convolution, window_gradients

# Operator, causal, with a mask.
FEW = [("rpe", True, False), ("fd", True, True), ("ski", False, True)]
ALL = [(*variant, masked) for variant in VARIANTS for masked in (False, True)]
CASES = [*FEW, *exhaustive(*(case for case in ALL if case not in FEW))]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, dynamic=None):
    """A function in one graph, and the graphs that it needs."""
    backend = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), backend


def products(backend) -> list[int]:
    """The number of nodes of each graph that are a convolution, and of transforms."""
    nodes = [[str(node.target) for node in graph.graph.nodes] for graph in backend.graphs]
    assert not any("fft" in name for names in nodes for name in names)
    return [sum("modeling_tnn.convolution" in name for name in names) for names in nodes]


def language_model(tno_type, causal, **fields):
    config = tiny_config(tno_type, causal, use_cache=False, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def results(call, model, inputs) -> list[torch.Tensor]:
    """Logits and gradients."""
    logits = call(**inputs).logits
    found = torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)
    return [logits, *(gradient for gradient in found if gradient is not None)]


def assert_same(actual, expected, tolerance=2e-6):
    assert max(relative_error(a, b) for a, b in zip(actual, expected, strict=True)) < tolerance


def ids_of(length: int) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) % 90 + 5


@pytest.mark.parametrize(("tno_type", "causal", "masked"), CASES)
def test_one_graph_with_one_node_for_each_product(tno_type, causal, masked):
    model, inputs = language_model(tno_type, causal), {"input_ids": ids_of(40)}
    if masked:
        inputs["attention_mask"] = (torch.arange(40) > torch.tensor([[5], [-1]])).long()
    call, backend = compiled(model)
    # The gradient of an S4D step is a sum of large terms of both signs.
    assert_same(results(call, model, inputs), results(model, model, inputs), 5e-6 if tno_type == "s4d" else 2e-6)
    names = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    # Two layers; SKI has two products in each.
    assert sum("modeling_tnn.convolution" in name for name in names) == (4 if tno_type == "ski" else 2)
    assert len(backend.graphs) == 1


def test_the_kernel_is_cut():
    """At the decay 0.9, 152 taps are above the resolution of float32. No graph holds a lag beyond."""
    model = language_model("rpe", True, decay=0.9)
    call, backend = compiled(model)
    torch.testing.assert_close(call(ids_of(300)).logits, model(ids_of(300)).logits)
    (graph,) = backend.graphs
    nodes = [node for node in graph.graph.nodes if "modeling_tnn.convolution" in str(node.target)]
    assert [tuple(node.args[1].meta["example_value"].shape) for node in nodes] == [(64, 152)] * 2
    assert products(backend) == [2]


@pytest.mark.slow
def test_a_few_graphs_serve_all_lengths():
    """One below the end of the kernels and one beyond it."""
    model = language_model("rpe", True, decay=0.9)
    call, backend = compiled(model, dynamic=True)
    for length in (20, 33, 64, 151, 153, 200, 257, 400):
        with torch.no_grad():
            assert relative_error(call(ids_of(length)).logits, model(ids_of(length)).logits) < 2e-6
    assert len(backend.graphs) <= 3


def test_eager_is_recorded_as_it_is():
    """Whoever wants PyTorch's own operations in the graph says so."""
    call, backend = compiled(lambda v, kernel: causal_toeplitz_matmul(v, kernel, "eager"))
    v, kernel = random(2, 30, 3), random(3, 9)
    torch.testing.assert_close(call(v, kernel), causal_toeplitz_matmul(v, kernel))
    names = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert any("fft" in name for name in names) and not any("modeling_tnn" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "response"])
def test_products(kind, dtype):
    """Of every kind, with taps shorter and longer than the text, in each dtype."""
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


@pytest.fixture
def triton_of_the_cpu(monkeypatch) -> list[str]:
    """A stand-in for the Triton kernels, and what was called of them. Their inputs have no gaps."""
    called = []

    def product(x, kernel, first):
        called.append("product")
        assert x.permute(2, 0, 1).is_contiguous()
        return fused_convolution(x, kernel, recorded.windows_of(x, kernel, first))

    def tile_gradients(g, x, kernel, u, mask, mixed, act, first, wanted):
        called.append("gradients")
        windows = recorded.windows_of(x.permute(1, 2, 0), kernel, first)
        return window_gradients(g, x, kernel, u, mask, mixed, act, windows, wanted)

    kernels = SimpleNamespace(tiled_convolution=product, tile_gradients=tile_gradients)
    monkeypatch.setitem(sys.modules, "modeling_tnn.kernels.triton", kernels)
    monkeypatch.setattr(choice, "refused_by_triton", lambda *_: None)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    return called


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("fd", False)])
def test_a_training_step_is_of_the_products_for_gpus(tno_type, causal, triton_of_the_cpu):
    """Forward, and both gradients. FD gives taps to the graph, not a response, which these products do not take."""
    model, inputs = language_model(tno_type, causal, tno_implementation="auto"), {"input_ids": ids_of(40)}
    found = results(compiled(model)[0], model, inputs)
    assert triton_of_the_cpu == ["product", "product", "gradients", "gradients"]
    for layer in model.model.layers:
        layer.mixer.tno.implementation = "fused"
    assert_same(found, results(model, model, inputs), 5e-6)
