"""Models with attention in some layers: attention by its definition, its fields, and whole models that have it."""

import copy
import json

import pytest
import torch

from helpers.hybrids import DIRECTIONS, HEADS, HYBRIDS, ROPE, attention_by_definition, hybrid_config
from helpers.mixers import MIXED, MixerTests
from helpers.models import lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.attention import make_attention_inputs
from modeling_tnn.inputs import token_positions
from modeling_tnn.tno import LayerContext
from tnn_programs.cli.parser import load_config, parse_overrides
from tnn_programs.plotting.reading import read_model

IDS = torch.randint(2, 99, (3, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = MASK[1, 15:] = MASK[2, 7:9] = 0


class HybridTests(MixerTests):
    """A mixer's promises of a model with attention, by the `product` that computes it."""

    product = "sdpa"
    sizes = (3, 2)  # transformers cannot reshape a batch without rows

    def build(self, causal, **fields):
        model = super().build(causal, **fields)
        model.set_attn_implementation(self.product)
        return model

    def test_equals_its_definition(self, causal):
        """Values and gradients, with padding before, behind and inside texts."""
        model = self.build(causal).double().model
        x, real = torch.randn(3, 19, 32, dtype=torch.float64, requires_grad=True), MASK.bool()
        inputs = make_attention_inputs(model, x, MASK, LayerContext(positions=token_positions(MASK, 0, x)))
        for layer in model.layers:
            if layer.attention is None:
                continue
            parameters = [x, *layer.attention.parameters()]
            found, expected = (
                layer.attention(x, LayerContext(attention_inputs=inputs))[0],
                attention_by_definition(layer.attention, x, MASK),
            )
            assert relative_error(found[real], expected[real]) < 1e-6
            gradients, wanted = (torch.autograd.grad(y[real].square().sum(), parameters) for y in (found, expected))
            assert max(relative_error(a, b) for a, b in zip(gradients, wanted, strict=True)) < 1e-6


class TestFull(HybridTests):
    fields = HYBRIDS["full"]


class TestSliding(HybridTests):
    fields = HYBRIDS["sliding"]


class TestAttentionAlone(HybridTests):
    fields = HYBRIDS["attention"]


class TestLayers(HybridTests):
    """Layers of different operators, with a norm, biases and an activation of their own."""

    fields = HYBRIDS["layers"]


class TestEager(HybridTests):
    """Its softmax is computed in float32: `test_products_agree` has the padding."""

    fields, product = HYBRIDS["attention"], "eager"
    test_padding = test_save_and_load = test_packed_rows = test_half_precision = None


def language_model(name, causal=True, product="sdpa", **fields):
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, hybrid_config(name, causal, **fields))
    model.set_attn_implementation(product)
    return model


@pytest.mark.parametrize(("name", "causal"), [("full", True), ("sliding", False), ("attention", True)])
def test_products_agree(name, causal):
    """A copy has its own; angles of rotary positions stay exact in half precision."""
    model = language_model(name, causal)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    expected, found = (one(IDS, attention_mask=MASK).logits[MASK.bool()] for one in (twin, model))
    assert relative_error(found, expected) < 5e-6
    assert model.model.rotary is None or model.bfloat16().model.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("causal", DIRECTIONS)
def test_what_attention_sees(causal):
    """Full attention gives a text with padding inside what it gives the text.

    Two layers with windows of 5 tokens see 9, or with both sides 10 on each.
    """
    fields = {"layer_types": ["full_attention"] * 2, "rope_parameters": ROPE, **HEADS}
    model, mask = seeded(TnnModel, tiny_config(causal=causal, **fields)), torch.ones_like(IDS[:1])
    mask[0, 6:11] = 0
    found = model(IDS[:1], attention_mask=mask)[0][mask.bool()]
    assert relative_error(found, model(IDS[:1][mask.bool()][None])[0][0]) < 5e-6
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, **HEADS}
    model, changed = seeded(TnnModel, tiny_config(causal=causal, **fields)), IDS.clone()
    changed[:, 0] = 98 - IDS[:, 0]
    reach = 8 if causal else 10
    difference = (model(changed)[0] - model(IDS)[0]).abs().amax((0, 2))
    assert difference[reach + 1 :].max() == 0 < difference[reach]


def test_scaled_rotary_positions():
    """Another max_position_embeddings at load changes no output."""
    plain = seeded(TnnModel, hybrid_config("full"))
    for kind in ("linear", "yarn", "llama3"):
        numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        numbers |= {} if kind == "linear" else {"original_max_position_embeddings": 16}
        rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **numbers}
        model = seeded(TnnModel, hybrid_config("full", rope_parameters=rope))
        assert relative_error(model(IDS)[0], plain(IDS)[0]) > 1e-4
        longer = seeded(TnnModel, hybrid_config("full", rope_parameters=rope, max_position_embeddings=64_000))
        longer.load_state_dict(model.state_dict())
        assert torch.equal(longer.rotary(IDS.double(), IDS)[0], model.rotary(IDS.double(), IDS)[0]), kind


@pytest.mark.parametrize(
    "fields", [HYBRIDS["full"], HYBRIDS["sliding"], MIXED["hyena"]], ids=["full", "sliding", "hyena"]
)
@torch.no_grad()
def test_conversion(fields):
    """Toeplitz layers become recurrences, attention and mixers stay."""
    model = lively_language_model(tno_type="rpe", decay=0.8, **fields)
    converted, reports = model.to_recurrent(order=32, window=8)
    kinds = model.config.layer_types
    assert [report.layer for report in reports] == [i for i, kind in enumerate(kinds) if kind == "toeplitz"]
    assert converted.config.layer_types == kinds and converted.config.tno_type == "modal"
    assert converted.config.toeplitz_mixer == model.config.toeplitz_mixer
    assert relative_error(converted(IDS).logits, model(IDS).logits) < 1e-3
    prompt = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(converted.generate(IDS, **prompt), converted.generate(IDS, use_cache=False, **prompt))
    alone = language_model("attention")
    assert alone.to_recurrent() == (alone, []), "nothing to convert"


def test_a_model_of_toeplitz_layers_is_as_it_was(tmp_path):
    """Its saved configuration has no field of attention, its weights have the names they had."""
    for fields in ({}, {"layer_types": ["toeplitz"] * 2}):
        config = tiny_config(**fields)
        model = seeded(TnnForCausalLM, config)
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert not {"layer_types", "rope_parameters", "sliding_window", "head_dim"} & saved.keys()
        assert not any("attention" in field for field in saved)
        assert config.layer_types == ["toeplitz"] * 2 and config.num_attention_heads is None
        names = list(model.model.layers[0].state_dict())
        assert names[:4] == ["mixer.u_proj.weight", "mixer.u_proj.bias", "mixer.v_proj.weight", "mixer.v_proj.bias"]


def test_defaults():
    config = TnnConfig(hidden_size=256, num_hidden_layers=3, layer_types=["toeplitz", "toeplitz", "full_attention"])
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 64)
    config.num_attention_heads = 8
    assert (config.num_key_value_heads, config.head_dim) == (8, 32)
    assert config.rope_parameters is None
    assert TnnConfig(num_hidden_layers=3).layer_types == ["toeplitz"] * 3
    config = TnnConfig(num_hidden_layers=3)
    config.num_hidden_layers = 4
    assert config.layer_types == ["toeplitz"] * 4
    config.layer_types = ["full_attention"] * 4
    assert config.num_attention_heads == 8


def test_rotary_parameters_are_completed():
    given = {"rope_theta": 500}
    config = hybrid_config("full", rope_parameters=given)
    assert config.rope_parameters == {"rope_theta": 500, "rope_type": "default"} and given == {"rope_theta": 500}
    config = hybrid_config("full", rope_parameters=None)
    config.rope_parameters = {"rope_theta": 500.0}
    assert seeded(TnnModel, config).rotary.inv_freq[1] == 500.0 ** (-1 / 5)


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForSequenceClassification])
def test_weights_of_attention(head):
    """One tensor for each layer of attention, from the product that computes them, as in transformers' models."""
    model = seeded(head, hybrid_config("sliding"))
    model.set_attn_implementation("eager")
    found = model(IDS, attention_mask=MASK, output_attentions=True).attentions
    assert [weights.shape for weights in found] == [(len(IDS), 4, IDS.shape[1], IDS.shape[1])]
    weights, length = found[0].transpose(1, 2)[MASK.bool()], IDS.shape[1]  # (tokens, H, S)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    window = torch.ones(length, length).tril().triu(1 - model.config.sliding_window).expand(3, -1, -1)[MASK.bool()]
    assert not weights[(window == 0)[:, None].expand_as(weights)].any()
    assert model(IDS, attention_mask=MASK).attentions is None
    model.set_attn_implementation("sdpa")
    assert model(IDS, attention_mask=MASK, output_attentions=True).attentions == ()


def test_dropout_of_attention():
    """While training, weights are dropped and the others grow; in evaluation nothing changes."""
    for product in ("sdpa", "eager"):
        model = language_model("full", True, product, attention_dropout=0.25)
        expected = language_model("full", True, product)(IDS).logits
        assert torch.equal(model(IDS).logits, expected)
        assert relative_error(model.train()(IDS).logits, expected) > 1e-3
    weights = model(IDS, output_attentions=True).attentions[0]
    causal = torch.ones(weights.shape[2:]).tril().bool()
    assert 0.2 < (weights[:, :, causal] == 0).float().mean() < 0.3 and 0.8 < weights.sum(-1).mean() < 1.2


def test_overrides_of_a_command_line():
    text = "num_hidden_layers=2,layer_types=[toeplitz, full_attention],rope_parameters={rope_theta: 100.0},decay=0.9"
    overrides = parse_overrides(text)
    assert overrides["layer_types"] == ["toeplitz", "full_attention"] and overrides["decay"] == 0.9
    assert parse_overrides("layer_norm_eps=1e-5,decay=-2E+3,tno_type=e5") == {
        "layer_norm_eps": 1e-5, "decay": -2000.0, "tno_type": "e5"}  # fmt: skip
    config = load_config("tnn-tiny", overrides)
    assert config.layer_types == overrides["layer_types"]
    assert config.rope_parameters == ROPE


def test_pictures_of_the_toeplitz_layers():
    kernels, _ = read_model(language_model("sliding").model, 16)
    assert [kernel.label for kernel in kernels] == ["layer 1"]
    with pytest.raises(ValueError, match="`layer_types` must have a 'toeplitz' layer to draw"):
        read_model(language_model("attention").model, 16)
