"""The Triton product against the product by definition, in Triton's interpreter or on a GPU.

`make test-slow` runs these in the interpreter, which has no right products of bfloat16. On a machine with a GPU,
`pytest tests/unit/test_toeplitz_triton.py` runs them there.
"""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from helpers.models import VARIANTS, random, relative_error, seeded, tiny_config
from helpers.products import ProductTests
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, list_presets, load_preset, numerics
from modeling_tnn.kernels import fallback
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from modeling_tnn.toeplitz_fused import NO_GATE, Gate

triton = pytest.importorskip("triton", reason="needs the package triton: `make test-slow` installs it")
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 (see `make test-slow`) or a GPU", allow_module_level=True)

from modeling_tnn.kernels import choice  # noqa: E402 - it needs triton
from modeling_tnn.kernels import triton as toeplitz_triton  # noqa: E402 - as above
from modeling_tnn.kernels.choice import choose, refused_by_triton  # noqa: E402 - as above
from modeling_tnn.kernels.triton import tiled_convolution  # noqa: E402 - as above

TOLERANCE = {torch.float32: 5e-7, torch.float16: 2e-3}
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 1.6e-2
# By the names in configurations.
ACTIVATIONS = {name: ACT2FN[name] for name in ("silu", "relu", "gelu", "linear")}


@pytest.fixture(autouse=True)
def nothing_fails():
    """On a GPU, kernels that fail would be replaced."""
    yield
    assert not fallback.FAILED


def masked(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length, device=DEVICE).view(batch, length) % 3 != 1


def single(*shape) -> torch.Tensor:
    """Numbers in float32 on the device."""
    return random(*shape).detach().float().to(DEVICE).requires_grad_()


class TestTriton(ProductTests):
    implementation = "triton"
    device = DEVICE
    tolerances = TOLERANCE
    acts = tuple(ACTIVATIONS)
    orders = 2
    takes_responses = False
    transforms = ()

    def product(self, v, kernel, first=0, gate=NO_GATE):
        return tiled_convolution(v, kernel, first, gate)


SIZES = [
    (torch.float32, 1, 201, 99, True, 32), (torch.float32, 3, 1100, 99, True, 64),
    (torch.float32, 3, 1100, 99, False, 32), (torch.float16, 1, 201, 99, True, 32),
    (torch.float16, 3, 1100, 99, True, 64), (torch.float16, 9, 543, 271, False, 128),
    (torch.float16, 15, 543, 255, True, 128), (torch.float16, 15, 543, 271, True, 256),
    (torch.float16, 15, 543, 272, True, 128),
]  # fmt: skip


def check(length, taps, first, dtype=torch.float32, batch=2, channels=1):
    v, u, kernel = single(batch, length, channels), single(batch, length, channels), single(channels, taps) / taps**0.5
    TestTriton().check(v, kernel, first, Gate(u, ACTIVATIONS["silu"], masked(batch, length)), dtype)


def test_every_number_is_written():
    """PyTorch's deterministic algorithms fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        for length in (1, 70):
            check(length, 9, 4, channels=3)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "batch", "length", "taps", "large", "columns"), SIZES)
def test_every_size(dtype, batch, length, taps, large, columns, monkeypatch):
    """Tiles of all rows of the table, by what is computed and by the generation of the GPU."""
    rows = {(size, columns) for size, sizes in toeplitz_triton.PRODUCT_SIZES.items() for columns in sizes}
    assert rows == {(dtype.itemsize, columns) for dtype, *_, columns in SIZES}
    sizes = toeplitz_triton.product_sizes(taps, batch, length, dtype.itemsize, large)
    assert sizes[0] == columns
    monkeypatch.setattr(toeplitz_triton, "product_sizes", lambda *_: sizes)
    for first in (0, taps // 2):
        check(length, taps, first, dtype, batch)


TAPS = [(1, 0), (3, 2), (64, 0), (65, 0), (66, 0), (193, 0), (194, 0), (400, 0), (399, 199), (40, 300)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradient_of_taps(dtype):
    """By definition, tap by tap: with fewer taps than a tile and more than positions, and any first lag."""
    for length in (1, 63, 64, 130, 300):
        g, x = (single(2, 3, length).detach().to(dtype) for _ in range(2))
        n = torch.arange(length, device=DEVICE)
        for taps, first in TAPS:
            found = toeplitz_triton.tap_gradient(g, x, taps, first)
            assert found.dtype == torch.float32 and found.is_contiguous()
            read = n + first - torch.arange(taps, device=DEVICE)[:, None]  # (K, L)
            met = x.double()[..., read.clamp(0, length - 1)] * ((read >= 0) & (read < length))
            expected = torch.einsum("cbn,cbkn->ck", g.double(), met)
            scale = expected.abs().max().clamp_min(1).item()
            assert relative_error(found.double(), expected, scale) < 5e-7, (length, taps, first)


def test_activations_of_the_presets():
    """Each of them is inside the kernels."""
    presets = [name for name in list_presets() if not name.startswith("peers/")]
    assert {one.hidden_act for name in presets for one in load_preset(name).layer_configs} <= ACTIVATIONS.keys()
    assert all(type(act) in toeplitz_triton.FUNCTIONS for act in (*ACTIVATIONS.values(), nn.SiLU(), nn.ReLU()))


def assert_close(found, expected, tolerance: float = 1e-4, scale: float = 1e-2):
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_error(actual, wanted, scale=scale) < tolerance


@pytest.mark.parametrize("act", [nn.Tanh(), nn.PReLU()], ids=["tanh", "prelu"])
def test_other_activations(act):
    """Outside the kernels, one with parameters too."""
    inputs, found = [single(*shape) for shape in ((2, 20, 2), (2, 9), (2, 20, 2))], []
    act = act.to(DEVICE)
    for way in ("triton", "eager"):
        y = toeplitz_matmul(inputs[0], inputs[1], way, Gate(inputs[2], act, masked(2, 20)))
        found.append([y, *torch.autograd.grad(y.square().sum(), [*inputs, *act.parameters()])])
    assert_close(*found, 1e-5, 0)


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """The numbers of taps of the products that the kernels compute, on a device that `auto` takes for a GPU."""
    found, compute = [], toeplitz_triton.product

    def product(v, kernel, *args, **kwargs):
        found.append(kernel.shape[1])
        return compute(v, kernel, *args, **kwargs)

    monkeypatch.setattr(toeplitz_triton, "product", product)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    return found


def training_model(tno_type: str, causal: bool, **fields):
    fields = {"hidden_dropout_prob": 0.0, "hidden_size": 8, "use_cache": False} | fields
    cls = TnnForCausalLM if causal else TnnForMaskedLM
    return seeded(cls, tiny_config(tno_type, causal, **fields)).to(DEVICE).train()


def outcome(model, call=None, **inputs) -> list[torch.Tensor]:
    """The loss and the gradients of all parameters."""
    call = model if call is None else call
    loss = call(torch.arange(126, device=DEVICE).view(2, 63) % 99, **inputs).logits.float().square().mean()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


MIXERS = [("rpe", True, {"toeplitz_mixer": "hyena"}), ("rtf", True, {"toeplitz_mixer": "s4", "gtu_expansion": 1})]


@pytest.mark.parametrize(("tno_type", "causal", "fields"), [*((*variant, {}) for variant in VARIANTS), *MIXERS])
def test_every_operator_goes_this_way(tno_type, causal, fields, products):
    """By `auto`, FD too, which would take its response at this length: logits and gradients of all parameters."""
    model, mask = training_model(tno_type, causal, **fields), masked(2, 63).long()
    found = outcome(model, attention_mask=mask)
    assert len(products) == (8 if tno_type == "ski" else 4)  # of two layers, forward and backward
    fused = training_model(tno_type, causal, tno_implementation="fused", **fields)
    assert_close(found, outcome(fused, attention_mask=mask))


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("fd", False), ("rtf", True)])
def test_in_half_precision(tno_type, causal, products):
    """Under autocast, and in a graph of torch.compile. RPE has 31 of its 63 taps."""
    dtype = torch.bfloat16 if torch.bfloat16 in TOLERANCE else torch.float16
    model = training_model(tno_type, causal, decay=0.76)
    expected = outcome(training_model(tno_type, causal, decay=0.76, tno_implementation="fused"))
    torch._dynamo.reset()
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        with torch.autocast(DEVICE, dtype):
            found = outcome(model, call)
        assert_close(found, expected, 0.1)
    assert products == [{"rpe": 31, "fd": 125, "rtf": 63}[tno_type]] * 8


@pytest.mark.parametrize("name", ["product", "tap_gradient"])
def test_a_kernel_that_does_not_compile(name, monkeypatch, caplog):
    """In the forward or in the backward pass alone: one warning, the same values, and the fused product after it."""
    failed = {}

    def fails(*args, **kwargs):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(fallback, "is_interpreted", lambda: False)
    monkeypatch.setattr(choice, "runs_on", lambda device: True)
    for module in (fallback, choice):
        monkeypatch.setattr(module, "FAILED", failed)
    monkeypatch.setattr(toeplitz_triton, name, fails)
    v, kernel, u = single(2, 33, 2), single(2, 9), single(2, 33, 2)
    gate = Gate(u, ACTIVATIONS["silu"], masked(2, 33))
    products = [causal_toeplitz_matmul(v, kernel, way, gate) for way in ("triton", "triton", "eager")]
    found, again, expected = ([y, *torch.autograd.grad(y.square().sum(), (v, kernel, u))] for y in products)
    assert_close(found, expected, 1e-5, 0)
    assert_close(again, expected, 1e-5, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "The Triton kernels of Toeplitz products do not run here, and others compute instead of them: RuntimeError: "
        "out of resource: shared memory"
    ]
    assert choose("triton", v, 9, torch.float32) == "fused"


def test_refusals():
    for shape, dtype, taps, of_filter, message in (
        ((1, 5, 2), torch.float64, 3, torch.float64, "bfloat16 and float16, got torch.float64"),
        ((1, 5, 2), torch.float32, 3, torch.float64, "got torch.float32 with a filter of torch.float64"),
        ((1, 5, 2), torch.float32, 4097, torch.float32, "at most 4,096 taps, got 4,097"),
        ((2**15, 2**11, 1), torch.float32, 3, torch.float32, "at most 33,554,432 positions, got 67,108,864"),
    ):
        one = torch.ones(1, 1, 1, dtype=dtype, device=DEVICE)
        assert message in refused_by_triton(one.expand(shape), taps, of_filter)
        assert "of compute capability 8.0" in refused_by_triton(one.to("meta"), taps, of_filter)
        assert refused_by_triton(one.float(), 4096, torch.float32) is None
