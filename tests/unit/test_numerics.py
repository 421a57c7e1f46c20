"""Precisions, extreme lengths and inputs; and what is left out in half precision."""

import itertools
import resource

import pytest
import torch
from torch.func import grad

from helpers.models import VARIANTS, relative_error, seeded, slow, tiny_config
from helpers.strategies import noise
from modeling_tnn import TnnForMaskedLM, TnnForTimeSeriesPrediction, TnnModel, causal_toeplitz_matmul, numerics
from modeling_tnn.modeling_tnn import TnnBlock
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.parallel.tensor import NORMS
from modeling_tnn.toeplitz_fused import Gate

POSITIONS = ("pre", "post", "res_post")


def one_layer(tno_type, causal, **fields) -> TnnBlock:
    """A narrow block whose operator is initialised."""
    defaults = {"hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 4096, "fd_resolution": 8192}
    block = seeded(TnnBlock, tiny_config(tno_type, causal, **defaults | fields), 0)
    torch.manual_seed(1)
    block.mixer.tno.reset_parameters()
    return block


def peak_memory() -> int:
    """The peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def assert_float32_is_float64(variant, length, decay):
    """Forward and backward."""
    block = one_layer(*variant, decay=decay)
    x = noise(1, length, 4, seed=0, dtype=torch.float32).requires_grad_()
    y = block(x)
    (gradient,) = torch.autograd.grad(y.square().mean(), x)
    exact_x = x.detach().double().requires_grad_()
    exact = block.double()(exact_x)
    (exact_gradient,) = torch.autograd.grad(exact.square().mean(), exact_x)
    assert relative_error(y, exact) < 1e-5 and relative_error(gradient, exact_gradient) < 1e-4, length


@pytest.mark.parametrize("variant", VARIANTS[::2] + slow(*zip(VARIANTS[1::2])))
def test_float32_at_any_length(variant):
    """Kernels that do not decay too."""
    for length in (1, 2, 31, 1023, 2**14 + 1):
        assert_float32_is_float64(variant, length, None)
    for decay in (1.0, 0.9):
        assert_float32_is_float64(variant, 1023, decay)


@pytest.mark.slow
def test_a_million_tokens(variant):
    """Finite, within 8 KB a token, and a causal layer begins as it does on a short text."""
    length, block = 2**20, one_layer(*variant, decay=None)
    x = noise(1, length, 4, seed=0, dtype=torch.float32).requires_grad_()
    before = peak_memory()
    y = block(x)
    y.square().mean().backward()
    assert peak_memory() - before < 8192 * length
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())
    if block.mixer.tno.causal:
        with torch.no_grad():
            assert relative_error(y[:, :5000], block(x[:, :5000])) < 1e-4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fields", [{}, {"mlp_act": "gelu", "toeplitz_mixer": "hyena"}], ids=["gtu", "hyena"])
def test_parts_of_a_long_pass_are_the_whole(fields, causal, monkeypatch):
    """With padding, and with several documents in a row; while gradients are recorded there are no parts."""
    model = seeded(TnnModel, tiny_config("hyena", causal, **fields)).double().eval()
    ids, positions = torch.arange(75).view(3, 25), torch.tensor([*range(9), *range(16)])[None]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    projection, calls = model.layers[0].glu.up_proj, []
    projection.register_forward_hook(lambda *given: calls.append(1))
    width = projection.out_features
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        whole = model(ids, **given).last_hidden_state
        calls.clear()
        for numbers, count in ((1, 25), (12 * width, 7)):  # an entry at a time, and parts of 4, the last one shorter
            monkeypatch.setattr(numerics, "PART", numbers)
            assert torch.equal(model(ids, **given).last_hidden_state, whole) and len(calls) == 1
            calls.clear()
            with torch.no_grad():
                assert relative_error(model(ids, **given).last_hidden_state, whole) < 1e-12
            assert len(calls) == count
            calls.clear()
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["s4d", "exponential"])
@pytest.mark.parametrize("causal", [True, False])
def test_filters_of_a_long_pass_in_parts(name, causal, monkeypatch):
    """Bit for bit, with gates, padding and groups of channels; the operator keeps its parameters."""
    for groups in (None, 8):
        operator = seeded(TnnModel, tiny_config(name, causal, num_filter_groups=groups)).layers[0].mixer.tno
        size = operator.channels * operator.group_size
        x, u = (noise(2, 100, size, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
        gate, held = Gate(u, torch.nn.ReLU(), torch.arange(100).expand(2, 100) > 9), len(next(operator.parameters()))
        with torch.no_grad():
            whole = operator(x, gate)
            monkeypatch.setattr(numerics, "PART", 300)  # three filters, and the rest
            assert torch.equal(operator(x, gate), whole) and len(next(operator.parameters())) == held
            monkeypatch.undo()


def test_long_transforms_of_a_kernel_that_does_not_fade():
    """First outputs and last gradients are small beside the largest, to which rounding in a transform is relative."""
    length, (v, kernel, weight) = (
        2**17 + 1,
        (1 + noise(1, 2**17 + 1, 1, seed=i, dtype=torch.float32) for i in range(3)),
    )

    def found(dtype):
        inputs = [one.to(dtype).requires_grad_() for one in (v, kernel[:, :, 0])]
        y = causal_toeplitz_matmul(*inputs)
        v_gradient, kernel_gradient = torch.autograd.grad((y * weight).sum(), inputs)
        return y[0, :9], v_gradient[0, length - 9 :], kernel_gradient[:, length - 9 :]

    for single, double in zip(found(torch.float32), found(torch.float64), strict=True):
        assert relative_error(single, double) < 1e-6


EXTREME = [(variant, "simplermsnorm", "pre") for variant in VARIANTS]
EXTREME += [(("rpe", True), norm, POSITIONS[i % 3]) for i, norm in enumerate(NORM_TYPES)]


@pytest.mark.parametrize("variant, norm_type, norm_position", EXTREME[::2] + slow(*EXTREME[1::2]), ids=str)
def test_extreme_inputs(variant, norm_type, norm_position):
    """Rows of zeros, rows that vanish and rows that are huge: values and gradients stay finite.

    So do values near the largest float16 number, whose squares are none.
    """
    model = seeded(TnnModel, tiny_config(*variant, norm_type=norm_type, norm_position=norm_position))
    model.train(norm_type == "batchnorm")  # else it does not look at its input
    for scale in (0.0, 1e-38, 1e-20, 1e6):
        model.zero_grad()
        x = (noise(2, 9, 32, seed=0, dtype=torch.float32) * scale).requires_grad_()
        hidden = model(inputs_embeds=x).last_hidden_state
        hidden.square().mean().backward()
        assert hidden.isfinite().all() and x.grad.isfinite().all(), scale
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None), scale
    if norm_type == "simplermsnorm":
        x = 3e4 * noise(2, 9, 32, seed=0, dtype=torch.float32).clamp(-1, 1)
        model.embedding_scale = 1.0
        assert model.half()(inputs_embeds=x.half()).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("norm_type", [name for name in NORM_TYPES if name != "batchnorm"])
def test_rows_without_a_direction(norm_type):
    """The derivatives of a norm at rows of zeros and below eps are bounded; in graphs and divided norms too.

    Values are those of the formula there, and so are the derivatives of other rows, the second ones included.
    """
    norm = seeded(NORM_TYPES[norm_type], 8).double()
    scales = torch.tensor([0, 1e-300, 1e-11, 1e-9, 1e-7, 1e-3, 1.0, 1e6]).double()[:, None]
    x, weight = noise(8, 8, seed=0, dtype=torch.float64) * scales, noise(8, 8, seed=1, dtype=torch.float64)
    divided = NORMS[type(norm).__name__]
    given = dict(norm.named_parameters())
    ways = {"module": norm, "compiled": torch.compile(norm, backend="aot_eager")}
    ways["divided"] = lambda x: divided(norm, x, given, lambda sums: sums.sum(-1, keepdim=True))
    with torch.no_grad():
        formula = norm(x)
    found = [grad(lambda x: (norm(x) * weight).sum())(x)]
    for way in ways.values():
        start = x.clone().requires_grad_()
        y = way(start)
        torch.testing.assert_close(y, formula, rtol=1e-12, atol=0)
        found.append(torch.autograd.grad((y * weight).sum(), start)[0])
    assert found[0][:4].abs().max() < 1e4
    assert all(relative_error(row, found[0][i]) < 1e-9 for gradient in found for i, row in enumerate(gradient))
    start = x[4:].requires_grad_()
    assert torch.autograd.gradcheck(norm, start[1:3], atol=1e-4) and torch.autograd.gradgradcheck(norm, start[2:3])
    zeros = x.float()[:4].requires_grad_()
    (first,) = torch.autograd.grad(norm(zeros).square().sum(), zeros, create_graph=True)
    assert torch.autograd.grad(first.sum(), zeros)[0].isfinite().all()


ZERO_STARTS = [("rpe", {"rpe_act": "silu"}), ("fd", {"fd_act": "gelu"}), ("fd", {"fd_act": "relu", "fd_input": "cos"})]


@pytest.mark.parametrize("tno_type, fields", [*ZERO_STARTS, ("s4d", {"input_channels": 1, "prediction_length": 4})])
def test_starts_whose_maps_read_zeros(tno_type, fields):
    """At lag and frequency 0, and where values are missing, gradients are of usual size, also with biases of zero."""
    head, given = TnnForMaskedLM, {"input_ids": torch.arange(40)[None], "labels": torch.arange(40)[None]}
    if "input_channels" in fields:
        values = noise(1, 44, 1, seed=0, dtype=torch.float32)
        head, given = TnnForTimeSeriesPrediction, {"past_values": values[:, :40], "future_values": values[:, 40:]}
        values[:, 7:15] = torch.nan
    model = seeded(head, tiny_config(tno_type, False, initializer="normal", rpe_layers=3, **fields))
    biases = [one.bias for one in model.modules() if getattr(one, "maps_zeros", False)]
    assert biases and all(0.01 < one.std() < 0.03 for one in biases)
    for _ in range(2):
        model.zero_grad()
        model(**given).loss.backward()
        assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) < 100
        for bias in biases:
            torch.nn.init.zeros_(bias)


def test_half_precision_on_long_texts(variant):
    """Long sums in transforms would overflow float16, and lags above 256 are no bfloat16 numbers.

    With a decay, the taps below the resolution are left out.
    """
    half = ((torch.bfloat16, 0.05), (torch.float16, 0.01))
    for decay, (dtype, tolerance) in itertools.product((None, 0.99), half):
        block = one_layer(*variant, decay=decay)
        x = noise(1, 3000, 4, seed=0, dtype=torch.float32).to(dtype)
        exact = block(x.float())
        poles = {n: p.detach().clone() for n, p in block.named_parameters() if n.endswith(("log_rate", "angle"))}
        half = block.to(dtype)
        for name, value in poles.items():  # from_pretrained keeps them in float32
            half.get_parameter(name).data = value
        assert relative_error(half(x), exact) < tolerance


@pytest.mark.parametrize("fields", [{"position_embedding": "sinusoidal"}, {"tno_type": "ski", "causal": False}])
def test_values_do_not_follow_the_default_dtype(fields):
    """It is the dtype of new parameters, and of whole numbers times a float."""
    model = seeded(TnnModel, tiny_config(**{"rpe_input": "sinusoidal"} | fields))
    ids, found = torch.arange(140).view(2, 70) % 97, []
    for default in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(default)
        try:
            found.append(model(ids).last_hidden_state)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
