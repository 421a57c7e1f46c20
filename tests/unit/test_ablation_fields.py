"""The fields of the ablations: explicit coefficients, inputs of the position encoder, other channel mixers."""

import torch

from helpers.models import seeded, tiny_config
from helpers.operators import OperatorTests, random_operator
from modeling_tnn import TnnModel
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rpe import RPE_INPUTS


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
