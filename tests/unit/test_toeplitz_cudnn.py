"""The product by cuDNN, with a stand-in for cuDNN that has its documented signature, against the dense matrix."""

import sys

import pytest
import torch
from torch import nn

from helpers.cudnn_stub import Stub
from helpers.models import random, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, toeplitz_choice, toeplitz_cudnn
from modeling_tnn.gating import Gate
from modeling_tnn.toeplitz import gated_causal_toeplitz_matmul, gated_toeplitz_matmul
from modeling_tnn.toeplitz_choice import choose

TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def install(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    toeplitz_cudnn.cudnn_function.cache_clear()


@pytest.fixture
def cudnn(monkeypatch):
    """The stand-in, on the CPU."""
    for module in (toeplitz_cudnn, toeplitz_choice):
        monkeypatch.setattr(module, "DEVICES", ("cpu",))
    stub = Stub()
    install(monkeypatch, stub)
    yield stub
    toeplitz_cudnn.cudnn_function.cache_clear()


def gated(way, matmul, v, kernel, u, mask=None, act=None):
    return matmul(v, kernel, way, Gate(u, act or nn.SiLU(), mask))


def mask_of(length: int) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) % 3 != 1


@pytest.mark.parametrize("length", [1, 2, 3, 17, 63, 130])
@pytest.mark.parametrize("taps", [1, 5, 64, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients(cudnn, causal, taps, length):
    """Short and long filters, padding, and the shift of bidirectional ones."""
    matmul = gated_causal_toeplitz_matmul if causal else gated_toeplitz_matmul
    inputs = (random(2, length, 3), random(3, taps if causal else 2 * taps - 1), random(2, length, 3))
    found = []
    for way in ("cudnn", "eager"):
        y = gated(way, matmul, *inputs, mask=mask_of(length))
        found.append([y, *torch.autograd.grad((y * y.detach().sin()).sum(), inputs)])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-12
    assert len(cudnn.calls) == 2  # forward, and once more before the backward pass


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(cudnn, dtype):
    """The taps are float32 at least, and so is their gradient; cuDNN gets them in the dtype of v."""
    v, kernel = (
        random(2, 40, 3).detach().to(dtype),
        random(3, 9).detach().to(torch.promote_types(dtype, torch.float32)),
    )
    found, expected = [], []
    for way, results, wide in (("cudnn", found, dtype), ("eager", expected, torch.float64)):
        inputs = [v.to(wide).requires_grad_(), kernel.to(dtype).to(torch.promote_types(wide, torch.float32))]
        inputs[1].requires_grad_()
        y = gated_causal_toeplitz_matmul(*inputs, way)
        assert y.dtype == wide
        results += [y, *torch.autograd.grad(y.square().sum(), inputs)]
    assert [x.dtype for x in found] == [dtype, dtype, kernel.dtype]
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_error(actual.double(), wanted) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("frozen", range(3))
def test_gradients_of_some_inputs(cudnn, frozen):
    inputs = [random(2, 20, 3), random(3, 9), random(2, 20, 3)]
    inputs[frozen].requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    ways = [gated(way, gated_causal_toeplitz_matmul, *inputs).square().sum() for way in ("cudnn", "eager")]
    for actual, expected in zip(*(torch.autograd.grad(y, wanted) for y in ways), strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("matmul", [gated_causal_toeplitz_matmul, gated_toeplitz_matmul])
def test_second_derivatives(cudnn, matmul):
    """cuDNN has none: those of PyTorch's own operations."""
    inputs, found = (random(2, 9, 2), random(2, 5), random(2, 9, 2)), []
    for way in ("cudnn", "eager"):
        y = gated(way, matmul, *inputs, mask=mask_of(9))
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-12


def test_an_activation_with_parameters(cudnn):
    act, found = nn.PReLU().double(), []
    inputs = (random(2, 9, 2), random(2, 5), random(2, 9, 2))
    for way in ("cudnn", "eager"):
        y = gated(way, gated_causal_toeplitz_matmul, *inputs, act=act)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*inputs, act.weight])])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize(
    ("model_class", "tno_type"), [(TnnForCausalLM, "rpe"), (TnnForCausalLM, "rtf"), (TnnForMaskedLM, "fd")]
)
def test_a_model(cudnn, model_class, tno_type):
    """All layers; of FD the taps are used, not the response."""
    ids, found = torch.arange(140).view(2, 70) % 99, []  # FD would take its response at this length
    for way in ("cudnn", "eager"):
        config = tiny_config(tno_type, model_class is TnnForCausalLM, tno_implementation=way, hidden_dropout_prob=0.0)
        model = seeded(model_class, config).double().train()
        loss = model(ids, attention_mask=mask_of(70).long()).logits.square().mean()
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected, scale=1e-3) < 1e-9
    assert len(cudnn.calls) >= 4


def refusal(v, taps: int, dtype=torch.float32) -> str:
    return toeplitz_choice.refused_by_cudnn(v, taps, dtype) or ""


def test_refusals(cudnn):
    v = torch.ones(2, 9, 3)
    assert not refusal(v, 4096) and choose("cudnn", v, 4096, torch.float32) == "cudnn"
    assert "needs a GPU of NVIDIA, got meta" in refusal(v.to("meta"), 3)
    assert "dtype of the inputs, torch.float32, got a filter of torch.float64" in refusal(v, 3, torch.float64)
    long = torch.ones(1, 1, 1).expand(1, 2**23, 1)
    assert not refusal(long, 4096)  # a short filter on any length
    assert "at most 8,388,608 taps and positions, got 4,097 and 8,388,608" in refusal(long, 4097)


@pytest.mark.parametrize("module", [None, Stub(92500), object()], ids=["missing", "old cuDNN", "old frontend"])
def test_without_it(cudnn, monkeypatch, module, caplog):
    """The fused product computes, after one line of warning."""
    install(monkeypatch, module)
    toeplitz_choice.logger.warning_once.cache_clear()
    v, kernel = random(2, 9, 3), random(3, 4)
    with caplog.at_level("WARNING"):
        products = [gated_causal_toeplitz_matmul(v, kernel, way) for way in ("cudnn", "cudnn", "fused")]
    assert all(torch.equal(product, products[-1]) for product in products)
    said = [record.getMessage() for record in caplog.records if "Toeplitz" in record.getMessage()]
    why = f"which needs {toeplitz_cudnn.NEEDS}, which is not installed."
    assert said == [f"Toeplitz products are computed by 'fused' instead of 'cudnn', {why}"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("taps", [1, 100, 3173])
@pytest.mark.parametrize("causal", [True, False])
def test_the_library_itself(causal, taps, dtype):
    """cuDNN on the GPU, where it is installed."""
    toeplitz_cudnn.cudnn_function.cache_clear()
    if toeplitz_cudnn.cudnn_function() is None:
        pytest.skip(f"needs {toeplitz_cudnn.NEEDS}")
    matmul, length = gated_causal_toeplitz_matmul if causal else gated_toeplitz_matmul, 600
    taps = min(taps, length) if causal else 2 * min(taps, length) - 1
    given = [x.detach().cuda().to(dtype) for x in (random(2, length, 3), random(3, taps), random(2, length, 3))]
    found = []
    for way, wide in (("cudnn", dtype), ("eager", torch.float64)):
        inputs = [x.to(wide).requires_grad_() for x in given]
        y = gated(way, matmul, *inputs)
        found.append([y, *torch.autograd.grad((y * y.detach()).sum(), inputs)])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual.double(), expected) < 8 * TOLERANCE[dtype]
