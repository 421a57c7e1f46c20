"""The operators `rpe`, `fd`, `rtf`, `explicit`, `modal`, those from outside the package, the fields of ablations.

`ski`, `s4d` and `hyena` have files of their own.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.gaussian_operator import GaussianOperator
from helpers.models import lively_language_model, random, relative_error, seeded, tiny_config
from helpers.operators import OperatorTests, random_operator
from helpers.products import compare_derivatives
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnModel,
    ToeplitzOperator,
    register_operator,
    tno_rtf,
)
from modeling_tnn.tno_auto import BUILT_IN, OPERATORS, build_tno
from modeling_tnn.tno_rpe import RPE_INPUTS
from modeling_tnn.tno_rtf import RationalTaps, rational_kernel
from modeling_tnn.toeplitz import gated_convolution


class TestRpe(OperatorTests):
    tno_type = "rpe"


class TestRpeWithoutDecay(OperatorTests):
    tno_type = "rpe"
    fields = {"decay": None}


class TestRpeWithLearnedDecay(OperatorTests):
    tno_type = "rpe"
    fields = {"decay": 0.8, "learnable_decay": True, "rpe_window": 30}


@pytest.mark.parametrize("decay", [None, 1, 0.9])
def test_decay(decay):
    plain, decayed = random_operator("rpe", False, decay=None), random_operator("rpe", False, decay=decay)
    lags = torch.arange(-49, 50, dtype=torch.float64).abs()
    expected = plain.coefficients(50) * (1.0 if decay is None else decay) ** lags
    assert relative_error(decayed.coefficients(50), expected) < 1e-14


def test_learnable_decay_stays_between_its_bound_and_one():
    operator = random_operator("rpe", True, decay=0.9, learnable_decay=True)
    with torch.no_grad():
        operator.decay_logit.copy_(torch.linspace(-50, 50, operator.channels))
    plain = random_operator("rpe", True, decay=None)
    plain.load_state_dict(operator.state_dict(), strict=False)
    ratio = (operator.coefficients(11) / plain.coefficients(11))[:, 10]
    assert ratio[0].item() == pytest.approx(0.9**10)
    assert ratio[-1].item() == pytest.approx(1.0)


class TestFd(OperatorTests):
    tno_type = "fd"


class TestFdWithShortGrid(OperatorTests):
    tno_type = "fd"
    fields = {"fd_resolution": 32, "fd_input": "cos"}


@pytest.mark.parametrize("length", [1, 2, 3, 17, 24, 25, 31, 32, 33])
def test_a_response_in_place_of_taps(length):
    """It is exact, in values and gradients, up to R tokens, and taken for the longest quarter of them."""
    operator = random_operator("fd", False, fd_resolution=32)
    assert (operator.response(length) is not None) == (24 < length <= 32)
    v = random(2, length, operator.channels)
    ways = (
        gated_convolution(v, operator.response_parts(), 0, "fused"),
        torch.einsum("dij,bjd->bid", operator.dense(length), v),
    )
    if length > 32:  # the lag R stands for both signs
        assert relative_error(*ways) > 1e-5
        return
    assert relative_error(*ways) < 1e-12
    cotangent = random(2, length, operator.channels)
    found = (torch.autograd.grad((y * cotangent).sum(), [v, *operator.parameters()]) for y in ways)
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-11 * other.abs().max().clamp(min=1.0)


def test_a_finer_grid_has_the_same_response():
    """The encoder at more frequencies: the coarse kernel is the fine one, folded at multiples of 2R."""
    for causal in (True, False):
        coarse, fine = (random_operator("fd", causal, fd_resolution=resolution) for resolution in (32, 128))
        assert relative_error(fine.response_parts()[..., ::4], coarse.response_parts()) < 1e-12
        response = (one.response_parts() for one in (coarse, fine))
        folded, whole = (torch.fft.irfft(one if causal else torch.complex(*one)) for one in response)  # (D, 2R)
        assert relative_error(whole.unflatten(1, (4, 64)).sum(1), folded) < 1e-12
        assert fine.coefficients(100)[:, -20:].abs().max() > 0 == coarse.coefficients(100)[:, -20:].abs().max()


@pytest.mark.parametrize("causal", [True, False])
def test_a_folder_from_before_keeps_its_grid(causal, tmp_path):
    """Saved when the default was twice the trained length, which its configuration states."""
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config("fd", causal, fd_resolution=128))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert (loaded.config.fd_resolution, TnnConfig(max_position_embeddings=64).fd_resolution) == (128, 64)
    ids = torch.randint(3, 99, (1, 200), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_trained_model_loads_on_a_finer_grid(tmp_path):
    """With the same weights; saved and loaded again it keeps the grid."""
    model = seeded(TnnForCausalLM, tiny_config("fd", fd_resolution=32))
    model.save_pretrained(tmp_path / "coarse")
    fine = TnnForCausalLM.from_pretrained(tmp_path / "coarse", fd_resolution=128)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fine.parameters(), strict=True))
    fine.save_pretrained(tmp_path / "fine")
    ids = torch.randint(3, 99, (1, 100), generator=torch.Generator().manual_seed(0))
    expected = fine(ids).logits
    torch.testing.assert_close(TnnForCausalLM.from_pretrained(tmp_path / "fine")(ids).logits, expected)
    # Beyond its R taps, and a little before, because the kernel is no longer folded.
    assert relative_error(model(ids).logits, expected) > 1e-6
    torch.testing.assert_close(fine(ids[:, :50]).logits, expected[:, :50], msg="a prefix sees what it saw")


@pytest.mark.parametrize("fields", [{}, {"learnable_decay": True}])
def test_a_decay_at_a_million_lags(fields):
    """In float32 the rounded decay to that power would be off by 1%."""
    operator = random_operator("rpe", True, decay=1 - 1e-6, hidden_size=4, **fields)
    expected = operator.coefficients(10**6).detach()[:, -999:]
    assert relative_error(operator.float().coefficients(10**6).detach()[:, -999:], expected) < 1e-5


class TestRtf(OperatorTests):
    tno_type = "rtf"


class TestRtfOfOddLength(OperatorTests):
    tno_type = "rtf"
    fields = {"max_position_embeddings": 63, "rtf_num_denominators": None}


def test_rtf_with_montel_constraint_is_stable():
    operator = random_operator("rtf", True)
    with torch.no_grad():
        operator.denominator.mul_(100)
    with pytest.raises(ValueError, match="causal"):
        random_operator("rtf", False).recurrence()
    form = operator.companion_form()
    assert (form.denominator.abs().sum(-1) < 1).all()
    assert operator.coefficients(1000).isfinite().all()


SIZES = [(1, 2, 1), (3, 8, 7), (3, 18, 18), (16, 64, 33)]


def test_texts_that_decode_together():
    """From four texts on, steps on a CPU share blocks. Their coefficients are shorter than a block, or longer."""
    for order in (1, 7, 8, 20):
        model = lively_language_model(tno_type="rtf", rtf_state_size=order)
        prompt = torch.arange(40).view(5, 8) * 2 + 3
        options = {"max_new_tokens": 20, "do_sample": False}
        assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


def plain_taps(denominator, numerator, direct, size, length):
    taps = rational_kernel(denominator, numerator, size)
    return torch.cat([taps[:, :1] + direct[:, None], taps[:, 1:]], dim=1)[:, :length]


def fused_taps(denominator, numerator, direct, size, length):
    return RationalTaps.apply(denominator, numerator, direct, size, length, torch.float64)


def filter_parameters(denominators: int, filters: int, order: int):
    return random(denominators, order) * (0.5 / order), random(filters, order), random(filters)


@pytest.mark.parametrize("chunk", [2**18, 64])
@pytest.mark.parametrize("denominators, filters", [(6, 6), (2, 6), (1, 7)])
def test_taps_and_derivatives(denominators, filters, chunk, monkeypatch):
    """Of three orders; against differences too."""
    monkeypatch.setattr(tno_rtf, "CHUNK", chunk)
    for order, size, length in SIZES:
        inputs = filter_parameters(denominators, filters, order)
        assert relative_error(fused_taps(*inputs, size, length), plain_taps(*inputs, size, length)) < 1e-13
        ways = [lambda *x, way=way, s=size, n=length: way(*x, s, n) for way in (fused_taps, plain_taps)]
        compare_derivatives(ways, inputs)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *x: fused_taps(*x, 8, 7), filter_parameters(denominators, filters, 2))


def test_parameters_alone_are_kept():
    saved = []
    denominator, numerator, direct = (x.detach().float().requires_grad_() for x in filter_parameters(8, 8, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        RationalTaps.apply(denominator, numerator, direct, 512, 512, torch.float64)
    assert sum(saved) == denominator.nbytes + numerator.nbytes


class TestExplicit(OperatorTests):
    tno_type = "explicit"


class TestExplicitAndShort(OperatorTests):
    tno_type = "explicit"
    fields = {"explicit_length": 20, "decay": None}


class TestModal(OperatorTests):
    tno_type = "modal"


class TestNormalizedInput(OperatorTests):
    tno_type = "rpe"
    fields = {"rpe_input": "normalized"}
    lengths = (100,)


def test_free_coefficients_are_the_parameters():
    for causal in (True, False):
        operator = random_operator("explicit", causal, decay=0.9)
        lags = torch.arange(0 if causal else -63, 64)
        torch.testing.assert_close(operator.coefficients(64), operator.taps * 0.9 ** lags.abs().double())
        assert operator.coefficients(70)[:, -6:].abs().max() == 0


def test_inputs_of_the_position_encoder():
    lags = torch.arange(-3.0, 4)[:, None]
    layers = {name: seeded(build_tno, tiny_config(rpe_input=name)).rpe.in_proj for name in RPE_INPUTS}
    one, waves = layers["normalized"], layers["sinusoidal"]
    torch.testing.assert_close(one(lags), lags / 64 * one.weight.t() + one.bias)
    torch.testing.assert_close((waves(lags) - waves.bias)[3], (torch.arange(16) % 2).float() @ waves.weight.t())


def test_block_without_glu():
    """It is the block whose GLU adds nothing."""
    with_glu = seeded(TnnModel, tiny_config())
    without, text = seeded(TnnModel, tiny_config(use_glu=False)), torch.randint(99, (1, 9))
    assert not any(".glu." in name for name, _ in without.named_parameters())
    without.load_state_dict(with_glu.state_dict(), strict=False)
    with torch.no_grad():
        for layer in with_glu.layers:
            layer.glu.down_proj.weight.zero_(), layer.glu.down_proj.bias.zero_()
    torch.testing.assert_close(without(text).last_hidden_state, with_glu(text).last_hidden_state)


def test_block_with_an_mlp():
    """It is the block whose GLU is multiplied by one, in values and gradients."""
    with_glu = seeded(TnnModel, tiny_config()).double()
    with_mlp = seeded(TnnModel, tiny_config(mlp_act="silu")).double()
    assert not any("gate_proj" in name for name, _ in with_mlp.named_parameters())
    weights = {name: value for name, value in with_glu.state_dict().items() if "glu.up_proj" not in name}
    with_mlp.load_state_dict({name.replace("gate_proj", "up_proj"): value for name, value in weights.items()})
    with torch.no_grad():
        for layer in with_glu.layers:
            layer.glu.up_proj.weight.zero_(), layer.glu.up_proj.bias.fill_(1)
    text, gradients = torch.randint(99, (1, 9)), []
    for model in (with_glu, with_mlp):
        states = model(text).last_hidden_state
        gradients.append(torch.autograd.grad(states.square().sum(), model.layers[0].glu.down_proj.weight)[0])
        gradients.append(states)
    torch.testing.assert_close(gradients[:2], gradients[2:], rtol=1e-10, atol=1e-12)


class TestGaussian(OperatorTests):
    tno_type = "gaussian"
    fields = {"num_gaussians": 3}


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.delitem(OPERATORS, "gaussian")


def test_fields_of_an_operator_are_kept(tmp_path):
    config = TnnConfig(tno_type="gaussian", num_gaussians=7, hidden_size=8)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.tno_type, loaded.num_gaussians) == ("gaussian", 7)
    assert build_tno(loaded).amplitudes.shape[1] == 7


def test_a_checkpoint_without_its_operator(tmp_path, unregistered):
    """The saved folder says what it needs, and the error names the module to import."""
    OPERATORS["gaussian"] = GaussianOperator
    seeded(TnnForCausalLM, tiny_config("gaussian")).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["tno_class"] == "helpers.gaussian_operator.GaussianOperator" and tiny_config().tno_class is None
    del OPERATORS["gaussian"]
    message = "saved with the operator helpers.gaussian_operator.GaussianOperator: import its module first"
    for load in (AutoConfig, AutoModelForCausalLM, TnnForCausalLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)
    config = tiny_config()
    vars(config)["tno_type"] = "dct"  # an assignment is refused by the configuration
    with pytest.raises(ValueError, match="'rpe', 'fd', 'ski', 'rtf', .*, 'explicit', 'hyena', .*got 'dct'"):
        build_tno(config)


def test_to_recurrent():
    model = seeded(TnnForCausalLM, tiny_config("gaussian")).double()
    converted, reports = model.to_recurrent(order=16)
    assert (converted.config.tno_type, converted.config.tno_class) == ("modal", None)
    assert converted.config.converted_from == "gaussian" and max(one.l2_layer for one in reports) < 1e-2


def test_registration(unregistered, monkeypatch):
    register_operator("gaussian", GaussianOperator)
    monkeypatch.setattr(GaussianOperator, "supports_bidirectional", False)
    with pytest.raises(ValueError, match="`causal` must be True with tno_type='gaussian', got False"):
        TnnConfig(tno_type="gaussian", causal=False)
    register_operator(
        "gaussian", type("GaussianOperator", (GaussianOperator,), {"__module__": "helpers.gaussian_operator"})
    )
    for name, cls, error in [
        ("rpe", GaussianOperator, ValueError),
        ("gaussian", type("Other", (ToeplitzOperator,), {}), ValueError),
        ("", GaussianOperator, TypeError),
        ("new", torch.nn.Module, TypeError),
        ("new", GaussianOperator(tiny_config("gaussian")), TypeError),
    ]:
        with pytest.raises(error):
            register_operator(name, cls)
    assert set(OPERATORS) == {*BUILT_IN, "gaussian"}
