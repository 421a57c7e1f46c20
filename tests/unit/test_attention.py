"""Models with attention in some layers: attention by its definition, and what the models promise of every layer."""

import json

import pytest
import torch

from helpers.hybrids import DIRECTIONS, HEADS, HYBRIDS, ROPE, attention_by_definition, hybrid_config
from helpers.models import checkpoint_activations, padded, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.inputs import token_positions
from modeling_tnn.mixers import view_of
from modeling_tnn.tno import Pass

IDS = torch.randint(2, 99, (3, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = MASK[1, 15:] = MASK[2, 7:9] = 0
EVERY_HYBRID = pytest.mark.parametrize("name", HYBRIDS)
EVERY_DIRECTION = pytest.mark.parametrize("causal", DIRECTIONS)
EVERY_PRODUCT = pytest.mark.parametrize("product", ["eager", "sdpa"])


def language_model(name, causal, product="sdpa", **fields):
    head = TnnForCausalLM if causal else TnnForMaskedLM
    model = seeded(head, hybrid_config(name, causal, **fields))
    model.set_attn_implementation(product)
    return model


def labels_for(model):
    if isinstance(model, TnnForSequenceClassification):
        return torch.tensor([0, 1, 1])
    return IDS.masked_fill(MASK == 0, -100)


@EVERY_HYBRID
@EVERY_DIRECTION
@EVERY_PRODUCT
def test_attention_is_its_definition(name, causal, product):
    """Values and gradients, with padding before, behind and inside texts."""
    model = language_model(name, causal, product).double().model
    x = torch.randn(3, 19, 32, dtype=torch.float64, requires_grad=True)
    view = view_of(model, x, MASK, None, token_positions(MASK, 0, x), None)
    for layer in model.layers:
        if layer.attention is None:
            continue
        parameters = [x, *layer.attention.parameters()]
        found, expected = layer.attention(x, Pass(view=view))[0], attention_by_definition(layer.attention, x, MASK)
        real = MASK.bool()
        assert relative_error(found[real], expected[real]) < 1e-6
        gradients, wanted = (torch.autograd.grad(y[real].square().sum(), parameters) for y in (found, expected))
        assert max(relative_error(a, b) for a, b in zip(gradients, wanted, strict=True)) < 1e-6


@EVERY_HYBRID
@EVERY_DIRECTION
def test_products_agree(name, causal):
    expected, found = (language_model(name, causal, one)(IDS, attention_mask=MASK).logits for one in ("eager", "sdpa"))
    assert relative_error(found[MASK.bool()], expected[MASK.bool()]) < 5e-6


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification])
@EVERY_HYBRID
@EVERY_DIRECTION
@EVERY_PRODUCT
@pytest.mark.parametrize("left, right", [(7, 9), (0, 13)])
def test_padding_changes_nothing(head, name, causal, product, left, right):
    if (head, causal) in ((TnnForCausalLM, False), (TnnForMaskedLM, True)):
        return
    model = seeded(head, hybrid_config(name, causal))
    model.set_attn_implementation(product)
    with torch.no_grad():
        bare, actual = model(IDS[:1])[0], model(**padded(IDS[0], left, right))[0]
    if head is not TnnForSequenceClassification:
        actual = actual[:, left : left + IDS.shape[1]]
    assert relative_error(actual, bare) < 2e-5  # the logits of two classes are small


@EVERY_DIRECTION
def test_positions_do_not_count_padding(causal):
    """Full attention alone gives a text with padding inside what it gives the text."""
    fields = {"layer_types": ["full_attention"] * 2, "rope_parameters": ROPE, **HEADS}
    model, mask = seeded(TnnModel, tiny_config(causal=causal, **fields)), torch.ones_like(IDS[:1])
    mask[0, 6:11] = 0
    found = model(IDS[:1], attention_mask=mask)[0][mask.bool()]
    assert relative_error(found, model(IDS[:1][mask.bool()][None])[0][0]) < 5e-6


@EVERY_HYBRID
@EVERY_DIRECTION
@EVERY_PRODUCT
def test_what_stands_at_padding_does_not_matter(name, causal, product):
    """Not even what is not a number; nor a row without real tokens. Gradients do not reach padding."""
    model, mask = language_model(name, causal, product).model, MASK.clone()
    mask[2] = 0
    embeddings = model.embed_tokens(IDS).detach()
    noise = embeddings.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_()
    found = model(inputs_embeds=noise, attention_mask=mask).last_hidden_state
    expected = model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
    assert found.isfinite().all() and torch.equal(found[mask.bool()], expected[mask.bool()])
    found[mask.bool()].square().sum().backward()
    assert noise.grad.isfinite().all() and noise.grad[mask == 0].abs().max() < 1e-5 * noise.grad.abs().max()


@EVERY_HYBRID
def test_the_future_changes_nothing(name):
    model, changed = language_model(name, True), IDS.clone()
    changed[:, 11:] = 3
    assert relative_error(model(changed).logits[:, :11], model(IDS).logits[:, :11]) < 5e-6


@EVERY_DIRECTION
def test_a_window_ends(causal):
    """Two layers of 5 tokens each see 9, or with both sides 10 on each."""
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, **HEADS}
    model, changed = seeded(TnnModel, tiny_config(causal=causal, **fields)), IDS.clone()
    changed[:, 0] = 98 - IDS[:, 0]
    reach = 8 if causal else 10
    difference = (model(changed)[0] - model(IDS)[0]).abs().amax((0, 2))
    assert difference[reach + 1 :].max() == 0 < difference[reach]


@EVERY_HYBRID
@pytest.mark.parametrize("head", [TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_with_and_without_checkpointing(name, head, reentrant):
    model = seeded(head, hybrid_config(name, head is TnnForCausalLM)).train()
    model(IDS, attention_mask=MASK, labels=labels_for(model)).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in expected.values())
    model.zero_grad()
    checkpoint_activations(model, {"use_reentrant": reentrant})
    model(IDS, attention_mask=MASK, labels=labels_for(model)).loss.backward()
    for key, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[key]) < 1e-5, key


@EVERY_HYBRID
@EVERY_DIRECTION
def test_the_loss_without_logits(name, causal):
    model = language_model(name, causal).train()
    losses = [model(IDS, labels=labels_for(model), skip_logits=skip).loss for skip in (True, False)]
    assert relative_error(*losses) < 1e-6


@EVERY_HYBRID
@EVERY_DIRECTION
@EVERY_PRODUCT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, causal, product, dtype):
    """A model in half precision and autocast. The angles of rotary positions stay exact."""
    model = language_model(name, causal, product)
    expected = model(IDS, attention_mask=MASK).logits[MASK.bool()]
    with torch.autocast("cpu", dtype):
        assert relative_error(model(IDS, attention_mask=MASK).logits[MASK.bool()], expected) < 0.05
    model.to(dtype)
    assert model.model.rotary is None or model.model.rotary.inv_freq.dtype == torch.float32
    assert relative_error(model(IDS, attention_mask=MASK).logits[MASK.bool()], expected) < 0.05


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


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rotary_positions(kind):
    """Another max_position_embeddings at load changes no output."""
    numbers = {"factor": 4.0} | ({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {})
    numbers |= {} if kind == "linear" else {"original_max_position_embeddings": 16}
    rope = {"rope_type": kind, "rope_theta": 100.0, **numbers}
    model = seeded(TnnModel, hybrid_config("full", rope_parameters=rope))
    plain = seeded(TnnModel, hybrid_config("full"))
    assert relative_error(model(IDS)[0], plain(IDS)[0]) > 1e-4
    longer = seeded(TnnModel, hybrid_config("full", rope_parameters=rope, max_position_embeddings=64_000))
    longer.load_state_dict(model.state_dict())
    assert torch.equal(longer.rotary(IDS.double(), IDS)[0], model.rotary(IDS.double(), IDS)[0])


FULL = ["toeplitz", "full_attention"]
SLIDING = ["toeplitz", "sliding_attention"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"layer_types": ["toeplitz", "mamba"]},
            "`layer_types` must be a list of 'toeplitz', .*got.*'mamba'",
        ),
        ({"layer_types": ["toeplitz"]}, r"`layer_types` must be a list of num_hidden_layers=2 names, got \['toep"),
        ({"layer_types": SLIDING}, "`sliding_window` must be an integer for layers of 'sliding_attention', got None"),
        ({"layer_types": SLIDING, "sliding_window": 1}, r"`sliding_window` must be in \[2, .*, got 1"),
        (
            {"layer_types": FULL, "num_attention_heads": 4, "num_key_value_heads": 3},
            "`num_key_value_heads` must be a divisor of 4 heads, got 3",
        ),
        ({"layer_types": FULL, "num_attention_heads": 0}, r"`num_attention_heads` must be in \[1, .*, got 0"),
        ({"layer_types": FULL, "head_dim": -1}, r"`head_dim` must be in \[1, .*, got -1"),
        (
            {"layer_types": FULL, "num_attention_heads": 2**20, "head_dim": 2**10},
            "`head_dim` must be at most 16,777,216 for 1048576 heads together, got 1024",
        ),
        ({"layer_types": FULL, "head_dim": 5, "rope_parameters": ROPE}, "`head_dim` must be even .*, got 5"),
        (
            {"layer_types": FULL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "`rope_parameters` must be None or have a rope_type of 'default', .*, got .*'dynamic'",
        ),
        ({"layer_types": FULL, "rope_parameters": {"rope_theta": 0}}, "`rope_parameters` must be .*'rope_theta', got"),
        ({"layer_types": FULL, "rope_parameters": {"rope_type": "linear"}}, "`rope_parameters` must be .*'factor'"),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_images_have_no_attention():
    fields = {"causal": False, "image_size": 8, "patch_size": 1, "layer_types": FULL}
    with pytest.raises(ValueError, match="`layer_types` must be 'toeplitz' for all layers of images, got"):
        TnnForImageClassification(tiny_config(**fields))


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForSequenceClassification, TnnForTokenClassification])
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


@EVERY_PRODUCT
def test_dropout_of_attention(product):
    """While training, weights are dropped and the others grow; in evaluation nothing changes."""
    model = language_model("full", True, product, attention_dropout=0.25)
    expected = language_model("full", True, product)(IDS).logits
    assert torch.equal(model(IDS).logits, expected)
    assert relative_error(model.train()(IDS).logits, expected) > 1e-3
    if product == "eager":
        weights = model(IDS, output_attentions=True).attentions[0]
        causal = torch.ones(weights.shape[2:]).tril().bool()
        assert 0.2 < (weights[:, :, causal] == 0).float().mean() < 0.3
        assert 0.8 < weights.sum(-1).mean() < 1.2
