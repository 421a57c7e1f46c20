"""The Triton product against the product by definition, in Triton's interpreter or on a GPU.

`make test-triton` runs these in the interpreter, which has no right products of bfloat16. On a machine with a GPU,
`pytest tests/unit/test_toeplitz_triton.py` runs them there.
"""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from helpers.models import VARIANTS, random, relative_error, seeded, tiny_config, two_sided
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, list_presets, load_preset, numerics
from modeling_tnn.kernels import fallback
from modeling_tnn.toeplitz import causal_toeplitz_matmul, dense_toeplitz, fit_lags, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate

triton = pytest.importorskip("triton", reason="needs the package triton: `make test-triton` installs it")
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 (see `make test-triton`) or a GPU", allow_module_level=True)

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


def dense_product(v, kernel, first: int, gate: Gate):
    """By definition: lags from -first on."""
    missing = kernel.shape[1] - 1 - 2 * first
    coefficients = nn.functional.pad(kernel, (max(0, missing), max(0, -missing)))
    matrices = dense_toeplitz(fit_lags(coefficients, v.shape[1]))
    return gate.apply(torch.einsum("dij,bjd->bid", matrices, gate.inputs(v)), "eager")


def check(dtype, v, kernel, first: int, u=None, mask=None, act=None, laid_out=lambda x: x):
    """Values and gradients of `tiled_convolution`; v and u are float64 and are rounded to `dtype` first.

    Args:
        laid_out: gives the gradient of the result another memory layout.
    """
    given = [x if x is None else x.detach().to(DEVICE, dtype).requires_grad_() for x in (v, u)]
    taps = kernel.detach().to(DEVICE).float().requires_grad_()
    y = tiled_convolution(given[0], taps, first, Gate(given[1], act, mask))
    exact = [x if x is None else x.detach().double().requires_grad_() for x in (*given, taps)]
    expected = dense_product(exact[0], exact[2], first, Gate(exact[1], act, mask))
    assert y.dtype == dtype and relative_error(y.double(), expected) < TOLERANCE[dtype]
    cotangent = laid_out(random(*y.shape).detach().to(y))
    found = torch.autograd.grad((y * cotangent).sum(), [x for x in (*given, taps) if x is not None])
    wanted = torch.autograd.grad((expected * cotangent.double()).sum(), [x for x in exact if x is not None])
    for actual, gradient in zip(found, wanted, strict=True):
        assert relative_error(actual.double(), gradient) < 2 * TOLERANCE[dtype]


def masked(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length, device=DEVICE).view(batch, length) % 3 != 1


def single(*shape) -> torch.Tensor:
    """Numbers in float32 on the device."""
    return random(*shape).detach().float().to(DEVICE).requires_grad_()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1, 3, 63, 130])
@pytest.mark.parametrize("taps", [1, 5, 64, 200])
def test_causal_product(length, taps, dtype):
    """Taps shorter and longer than the text, inside a gate and with padding."""
    v, u, kernel = random(2, length, 3), random(2, length, 3), random(3, taps) / taps**0.5
    check(dtype, v, kernel[:, :length], 0, u, masked(2, length), ACTIVATIONS["silu"])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [2, 17, 64, 191])
@pytest.mark.parametrize("reach", [1, 4, 70])
def test_two_sided_product(length, reach, dtype):
    reach = min(reach, length)
    v, u, kernel = random(3, length, 2), random(3, length, 2), random(2, 2 * reach - 1) / reach**0.5
    check(dtype, v, kernel, reach - 1, u, masked(3, length), ACTIVATIONS["silu"])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("length", "taps", "first"), [(2048, 1587, 0), (1500, 2999, 1499)])
def test_filters_of_real_models(length, taps, first, dtype):
    """Decay 0.99, and every lag on both sides."""
    v, u, kernel = random(2, length, 1), random(2, length, 1), random(1, taps) / taps**0.5
    check(dtype, v, kernel, first, u, masked(2, length), ACTIVATIONS["silu"])


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_gates(act, with_gate, with_mask):
    v, u, kernel = random(2, 65, 3), random(2, 65, 3) if with_gate else None, random(3, 9)
    check(torch.float32, v, kernel, 4, u, masked(2, 65) if with_mask else None, ACTIVATIONS[act])


def test_without_an_activation():
    check(torch.float32, random(2, 65, 3), random(3, 9), 4)


def test_memory_layouts():
    """Every order of the three dimensions, of the gradient too, and views with gaps and of one number."""
    kernel, act = random(4, 9).detach(), ACTIVATIONS["silu"]
    v, u = random(3, 70, 4).detach(), random(3, 70, 4).detach()
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        back = [order.index(axis) for axis in range(3)]

        def laid_out(x, order=order, back=back):
            return x.permute(order).contiguous().permute(back)

        check(torch.float32, laid_out(v), kernel, 0, laid_out(u), masked(3, 70), act, laid_out)
        check(torch.float32, laid_out(v), kernel, 0, laid_out=laid_out)
    wide = random(6, 140, 8).detach()
    check(torch.float32, wide[::2, ::2, ::2], kernel, 0, wide[1::2, 1::2, 1::2], masked(6, 140)[::2, ::2], act)
    check(torch.float32, v[:1, :1].expand(3, 70, 4), kernel, 0, u, None, act)


@pytest.mark.parametrize("frozen", range(3))
def test_gradients_of_some_inputs(frozen):
    inputs = [single(*shape) for shape in ((2, 40, 3), (3, 9), (2, 40, 3))]

    def gradients(wanted):
        v, kernel, u = inputs
        y = tiled_convolution(v, kernel, 0, Gate(u, ACTIVATIONS["silu"]))
        return torch.autograd.grad(y.square().sum(), wanted)

    every = gradients(inputs)
    inputs[frozen].requires_grad_(False)
    others = [i for i in range(3) if i != frozen]
    for i, gradient in zip(others, gradients([inputs[i] for i in others]), strict=True):
        assert torch.equal(gradient, every[i])


def test_second_derivatives():
    """Those of PyTorch's own operations."""
    inputs = [single(*shape) for shape in ((2, 20, 2), (2, 5), (2, 20, 2))]
    mask, act = masked(2, 20), ACTIVATIONS["silu"]
    found = []
    for way in (tiled_convolution, dense_product):
        v, kernel, u = inputs
        y = way(v, kernel, 0, Gate(u, act, mask))
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_nan_at_padding_reaches_nothing():
    v = single(2, 70, 3).detach()
    mask, kernel, u = masked(2, 70), single(3, 20).detach(), single(2, 70, 3).detach()
    gate = Gate(u, ACTIVATIONS["silu"], mask)
    clean = tiled_convolution(v, kernel, 0, gate)
    assert torch.equal(tiled_convolution(v.masked_fill(~mask[..., None], torch.nan), kernel, 0, gate), clean)


@pytest.mark.parametrize("length", [1, 70])
def test_every_number_is_written(length):
    """PyTorch's deterministic algorithms fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        v, u, kernel = random(2, length, 3), random(2, length, 3), random(3, 9)
        check(torch.float32, v, kernel, 4, u, masked(2, length), ACTIVATIONS["silu"])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_row_is_computed_alone():
    """Texts of a batch do not see each other."""
    v, kernel = single(3, 70, 2).detach(), single(2, 30).detach()
    together = tiled_convolution(v, kernel, 0)
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], tiled_convolution(v[row : row + 1], kernel, 0))


SIZES = [
    (torch.float32, 1, 201, 99, True, 32),
    (torch.float32, 3, 1100, 99, True, 64),
    (torch.float32, 3, 1100, 99, False, 32),
    (torch.float16, 1, 201, 99, True, 32),
    (torch.float16, 3, 1100, 99, True, 64),
    (torch.float16, 9, 543, 271, False, 128),
    (torch.float16, 15, 543, 255, True, 128),
    (torch.float16, 15, 543, 271, True, 256),
    (torch.float16, 15, 543, 272, True, 128),
]


@pytest.mark.parametrize(("dtype", "batch", "length", "taps", "large", "columns"), SIZES)
@pytest.mark.parametrize("two_sided", [False, True])
def test_every_size(dtype, batch, length, taps, large, columns, two_sided, monkeypatch):
    """Tiles of all rows of the table, by what is computed and by the generation of the GPU."""
    sizes = toeplitz_triton.product_sizes(taps, batch, length, dtype.itemsize, large)
    assert sizes[0] == columns
    monkeypatch.setattr(toeplitz_triton, "product_sizes", lambda *_: sizes)
    v, u, kernel = random(batch, length, 1), random(batch, length, 1), random(1, taps) / taps**0.5
    check(dtype, v, kernel, taps // 2 * two_sided, u, masked(batch, length), ACTIVATIONS["silu"])


def test_every_row_of_the_table_is_tested():
    rows = {(size, columns) for size, sizes in toeplitz_triton.PRODUCT_SIZES.items() for columns in sizes}
    assert rows == {(dtype.itemsize, columns) for dtype, *_, columns in SIZES}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1, 63, 64, 130, 300])
@pytest.mark.parametrize(
    ("taps", "first"), [(1, 0), (3, 2), (64, 0), (65, 0), (66, 0), (193, 0), (194, 0), (400, 0), (399, 199), (40, 300)]
)
def test_gradient_of_taps(taps, first, length, dtype):
    """By definition, tap by tap: with fewer taps than a tile and more than positions, and any first lag."""
    g, x = (random(2, 3, length).detach().to(DEVICE, dtype) for _ in range(2))
    found, expected = toeplitz_triton.tap_gradient(g, x, taps, first), torch.zeros(2, taps, dtype=torch.float64)
    assert found.dtype == torch.float32 and found.is_contiguous()
    for tap in range(taps):
        n = torch.arange(length, device=DEVICE)
        n = n[(n + first - tap >= 0) & (n + first - tap < length)]
        expected[:, tap] = (g[..., n].double() * x[..., n + first - tap].double()).sum((1, 2)).cpu()
    assert relative_error(found.cpu().double(), expected, scale=expected.abs().max().clamp_min(1).item()) < 5e-7


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equal_bits(dtype):
    """Nothing depends on the order of the programs."""
    v, u, kernel = (single(*shape) for shape in ((2, 700, 3), (2, 700, 3), (3, 300)))
    v, u, found = v.to(dtype), u.to(dtype), []
    for _ in range(2):
        y = tiled_convolution(v, kernel, 150, Gate(u, ACTIVATIONS["silu"], masked(2, 700)))
        found.append([y, *torch.autograd.grad(y.square().sum(), (v, kernel, u))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_two_sided_kernel_of_a_causal_one():
    v, kernel = single(2, 33, 2).detach(), single(2, 33).detach()
    torch.testing.assert_close(tiled_convolution(v, kernel, 0), tiled_convolution(v, two_sided(kernel), 32))


def test_activations_of_the_presets():
    """Each of them is inside the kernels."""
    presets = [name for name in list_presets() if not name.startswith("peers/")]
    assert {load_preset(name).hidden_act for name in presets} <= ACTIVATIONS.keys()
    assert all(type(act) in toeplitz_triton.FUNCTIONS for act in (*ACTIVATIONS.values(), nn.SiLU(), nn.ReLU()))


@pytest.mark.parametrize("act", [nn.Tanh(), nn.PReLU()], ids=["tanh", "prelu"])
def test_other_activations(act):
    """Outside the kernels, one with parameters too."""
    inputs, found = [single(*shape) for shape in ((2, 20, 2), (2, 9), (2, 20, 2))], []
    act = act.to(DEVICE)
    for way in ("triton", "eager"):
        y = toeplitz_matmul(inputs[0], inputs[1], way, Gate(inputs[2], act, masked(2, 20)))
        found.append([y, *torch.autograd.grad(y.square().sum(), [*inputs, *act.parameters()])])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-5


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
    loss = call(torch.arange(140, device=DEVICE).view(2, 70) % 99, **inputs).logits.float().square().mean()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def assert_close(found, expected, tolerance: float = 1e-4):
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_error(actual, wanted, scale=1e-2) < tolerance


MIXERS = [("rpe", True, {"toeplitz_mixer": "hyena"}), ("rtf", True, {"toeplitz_mixer": "s4", "gtu_expansion": 1})]


@pytest.mark.parametrize(("tno_type", "causal", "fields"), [*((*variant, {}) for variant in VARIANTS), *MIXERS])
def test_every_operator_goes_this_way(tno_type, causal, fields, products):
    """By `auto`, FD too, which would take its response at this length: logits and gradients of all parameters."""
    model, mask = training_model(tno_type, causal, **fields), masked(2, 70).long()
    found = outcome(model, attention_mask=mask)
    assert len(products) == (8 if tno_type == "ski" else 4)  # of two layers, forward and backward
    fused = training_model(tno_type, causal, tno_implementation="fused", **fields)
    assert_close(found, outcome(fused, attention_mask=mask))


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("fd", False), ("rtf", True)])
def test_in_half_precision(tno_type, causal, products):
    """Under autocast, and in a graph of torch.compile. RPE has 31 of its 70 taps."""
    dtype = torch.bfloat16 if torch.bfloat16 in TOLERANCE else torch.float16
    model = training_model(tno_type, causal, decay=0.76)
    expected = outcome(training_model(tno_type, causal, decay=0.76, tno_implementation="fused"))
    torch._dynamo.reset()
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        with torch.autocast(DEVICE, dtype):
            found = outcome(model, call)
        assert_close(found, expected, 0.1)
    assert products == [{"rpe": 31, "fd": 139, "rtf": 70}[tno_type]] * 8


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
    for _ in range(2):
        found = causal_toeplitz_matmul(v, kernel, "triton", gate)
        found = [found, *torch.autograd.grad(found.square().sum(), (v, kernel, u))]
    expected = causal_toeplitz_matmul(v, kernel, "eager", gate)
    for actual, wanted in zip(
        found, [expected, *torch.autograd.grad(expected.square().sum(), (v, kernel, u))], strict=True
    ):
        assert relative_error(actual, wanted) < 1e-5
    assert [record.getMessage() for record in caplog.records] == [
        "The Triton kernels of Toeplitz products do not run here, and others compute instead of them: RuntimeError: "
        "out of resource: shared memory"
    ]
    assert choose("triton", v, 9, torch.float32) == "fused"


@pytest.mark.parametrize(
    ("shape", "dtype", "taps", "of_filter", "message"),
    [
        ((1, 5, 2), torch.float64, 3, torch.float64, "bfloat16 and float16, got torch.float64"),
        ((1, 5, 2), torch.float32, 3, torch.float64, "got torch.float32 with a filter of torch.float64"),
        ((1, 5, 2), torch.float32, 4097, torch.float32, "at most 4,096 taps, got 4,097"),
        ((2**15, 2**11, 1), torch.float32, 3, torch.float32, "at most 33,554,432 positions, got 67,108,864"),
    ],
)
def test_refusals(shape, dtype, taps, of_filter, message):
    one = torch.ones(1, 1, 1, dtype=dtype, device=DEVICE)
    assert message in refused_by_triton(one.expand(shape), taps, of_filter)
    assert "of compute capability 8.0" in refused_by_triton(one.to("meta"), taps, of_filter)
    assert refused_by_triton(one.float(), 4096, torch.float32) is None
