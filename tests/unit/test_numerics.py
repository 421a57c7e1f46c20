"""Precisions, extreme lengths, extreme inputs: the result is right to the digits its dtype has, and always finite."""

import resource

import pytest
import torch

from helpers.models import VARIANTS, relative_error, seeded, tiny_config
from helpers.strategies import noise
from modeling_tnn import TnnModel
from modeling_tnn.modeling_tnn import TnnBlock
from modeling_tnn.norms import NORM_TYPES

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


EXTREME = [(variant, "simplermsnorm", "pre") for variant in VARIANTS]
EXTREME += [(("rpe", True), norm, position) for norm in NORM_TYPES for position in POSITIONS]


@pytest.mark.parametrize("variant, norm_type, norm_position", EXTREME, ids=str)
def test_extreme_inputs(variant, norm_type, norm_position):
    """Rows of zeros, rows that vanish and rows that are huge: values and gradients stay finite."""
    model = seeded(TnnModel, tiny_config(*variant, norm_type=norm_type, norm_position=norm_position))
    model.train(norm_type == "batchnorm")  # else it does not look at its input
    for scale in (0.0, 1e-38, 1e-20, 1e6):
        model.zero_grad()
        x = (noise(2, 9, 32, seed=0, dtype=torch.float32) * scale).requires_grad_()
        hidden = model(inputs_embeds=x).last_hidden_state
        hidden.square().mean().backward()
        assert hidden.isfinite().all() and x.grad.isfinite().all(), scale
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None), scale


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_gradient_of_a_norm_at_zero(norm_type):
    """The root of a sum of squares has no derivative there; zero is what it takes."""
    norm = NORM_TYPES[norm_type](8)
    x = torch.zeros(1, 3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in norm.parameters())


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_half_precision_on_long_texts(variant, dtype, tolerance):
    """Long sums in transforms would overflow float16, and lags above 256 are no bfloat16 numbers."""
    block = one_layer(*variant, decay=None)
    x = noise(1, 3000, 4, seed=0, dtype=torch.float32).to(dtype)
    exact = block(x.float())
    poles = {name: p.detach().clone() for name, p in block.named_parameters() if name.endswith(("log_rate", "angle"))}
    half = block.to(dtype)
    for name, value in poles.items():  # from_pretrained keeps them in float32
        half.get_parameter(name).data = value
    assert relative_error(half(x), exact) < tolerance


def test_large_values_in_float16(variant):
    """Values near the largest float16 number, whose squares are none."""
    model = seeded(TnnModel, tiny_config(*variant)).half()
    x = 3e4 * noise(2, 9, 32, seed=0, dtype=torch.float32).clamp(-1, 1)
    model.embedding_scale = 1.0
    assert model(inputs_embeds=x.half()).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [{"position_embedding": "sinusoidal"}, {"rpe_input": "sinusoidal"}, {"tno_type": "ski", "causal": False}],
    ids=str,
)
def test_values_do_not_follow_the_default_dtype(fields, default):
    """It is the dtype of new parameters, and of whole numbers times a float."""
    model = seeded(TnnModel, tiny_config(**fields))
    ids = torch.arange(140).view(2, 70) % 97
    expected = model(ids).last_hidden_state
    torch.set_default_dtype(default)
    try:
        found = model(ids).last_hidden_state
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
