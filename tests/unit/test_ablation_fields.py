"""The fields of the ablations: explicit coefficients, inputs of the position encoder, other channel mixers."""

import pytest
import torch

from helpers.models import relative_error, seeded, tiny_config
from helpers.operators import OperatorTests, random_operator
from modeling_tnn import TnnForCausalLM, TnnModel
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rpe import RPE_INPUTS


class TestNormalizedInput(OperatorTests):
    tno_type = "rpe"
    fields = {"rpe_input": "normalized"}
    lengths = (100,)


class TestSinusoidalInput(OperatorTests):
    tno_type = "rpe"
    fields = {"rpe_input": "sinusoidal"}
    lengths = (100,)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_free_coefficients_are_the_parameters(causal):
    operator = random_operator("explicit", causal, decay=0.9)
    lags = torch.arange(0 if causal else -63, 64)
    torch.testing.assert_close(operator.coefficients(64), operator.taps * 0.9 ** lags.abs().double())
    assert operator.coefficients(70)[:, -6:].abs().max() == 0
    middle = operator.coefficients(5) if causal else operator.coefficients(64)[:, 59:68]
    torch.testing.assert_close(operator.coefficients(5), middle)


def test_inputs_of_the_position_encoder():
    lags = torch.arange(-3.0, 4)[:, None]
    operators = {name: seeded(build_tno, tiny_config(rpe_input=name)).rpe.in_proj for name in RPE_INPUTS}
    expected = lags / 64 * operators["normalized"].weight.t() + operators["normalized"].bias
    torch.testing.assert_close(operators["normalized"](lags), expected)
    waves = operators["sinusoidal"](lags) - operators["sinusoidal"].bias
    assert waves.shape == (7, 16) and operators["sinusoidal"].weight.shape == (16, 16)
    by_hand = (
        torch.where(torch.arange(16) % 2 == 0, torch.tensor(0.0), torch.tensor(1.0))
        @ operators["sinusoidal"].weight.t()
    )
    torch.testing.assert_close(waves[3], by_hand)


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


def test_free_kernel_converts_to_a_recurrence():
    model, text = seeded(TnnForCausalLM, tiny_config("explicit", decay=0.9)).double(), torch.randint(99, (1, 40))
    converted, report = model.to_recurrent(order=64, window=40)
    assert relative_error(converted(text).logits, model(text).logits) < 1e-6 and len(report) == 2
