"""The gated Toeplitz unit, Hyena and the mixer of S4's blocks: their definitions, packing, graphs, files, errors.

Every way of decoding is in `test_generation.py` and its neighbours.
"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from helpers import gaussian_operator
from helpers.heads import LanguageModelTests
from helpers.hybrids import HYBRIDS
from helpers.mixers import (
    IDS,
    MIXED,
    MixerTests,
    assert_is_definition,
    gtu_by_definition,
    hyena_by_definition,
    mixer_of,
    multihyena_by_definition,
    s4_by_definition,
)
from helpers.models import random, relative_error, seeded, tiny_config
from modeling_tnn import (
    DecodingStep,
    SequenceParallel,
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnModel,
    numerics,
    outer_product,
)
from modeling_tnn.configuration_tnn import MIXERS
from modeling_tnn.mixers import ShortConvolution
from modeling_tnn.modeling_tnn import TOEPLITZ_MIXERS
from modeling_tnn.outer_product import convolved_product, masked_product
from modeling_tnn.tno import LayerContext


class TestGatedToeplitzUnit(MixerTests):
    """It has what no mixer changes, too."""

    definition = staticmethod(gtu_by_definition)
    test_outputs, test_refused = LanguageModelTests.test_outputs, LanguageModelTests.test_refused
    test_equal_inputs = LanguageModelTests.test_equal_inputs


class TestHyena(MixerTests):
    fields = MIXED["hyena"]
    definition = staticmethod(hyena_by_definition)


class TestMultiHyena(MixerTests):
    fields = MIXED["multihyena"]
    definition = staticmethod(multihyena_by_definition)


class TestS4(MixerTests):
    fields = MIXED["s4"]
    silent = ("glu_norm.weight", "glu_norm.gate")  # it has no GLU
    definition = staticmethod(s4_by_definition)


def language_model(name, causal=True, tno_type="rtf", **fields):
    fields = {"hidden_dropout_prob": 0.0} | (MIXED | HYBRIDS)[name] | fields
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields))


def test_with_every_operator(variant):
    for mixer in (TestHyena, TestMultiHyena, TestS4):
        assert_is_definition(mixer.definition, mixer_of(mixer.fields, *variant), 9)


def test_other_sizes_and_operators():
    """An operator that the user has registered, too."""
    assert gaussian_operator.GaussianOperator
    sizes = [(1, None, True), (2, 3, True), (4, None, True), (5, None, False)]
    for taps, rank, causal in sizes:
        mixer = mixer_of(MIXED["hyena"], "rpe", causal, short_conv_kernel=taps, hyena_rank=rank)
        assert_is_definition(hyena_by_definition, mixer, 9)
    assert_is_definition(hyena_by_definition, mixer_of(MIXED["hyena"], "gaussian"), 17)


@pytest.mark.parametrize("causal", [True, False])
def test_both_forms_of_the_heads(causal):
    """Equal values for few and many lags, heads that share a filter, parts without gradients; second derivatives."""
    for heads, size, filters, length, taps in [(2, 3, 2, 7, 7), (4, 2, 2, 9, 4), (3, 1, 1, 1, 1), (2, 4, 1, 40, 63)]:
        parts = [random(2, length, heads * size).permute(2, 0, 1).unflatten(0, (heads, size)) for _ in range(3)]
        kernel = random(filters, taps if causal else 2 * taps - 1)
        found = [form(*parts, kernel, causal) for form in (masked_product, convolved_product)]
        assert relative_error(*found) < 1e-12
    inputs = [one[..., :5].clone().requires_grad_() for one in (*parts, kernel)]
    for form in (masked_product, partial(convolved_product, implementation="fused")):
        torch.autograd.gradgradcheck(lambda *given, form=form: form(*given, causal), inputs, fast_mode=True)


def test_heads_of_a_long_sequence(monkeypatch):
    """The convolved form, a part of the heads at a time, and the form that a graph records."""
    mixer = mixer_of(MIXED["multihyena"], "rtf").eval()
    x = random(2, 50, 6)
    expected = mixer(x)  # 50 positions, heads of 3: convolved
    monkeypatch.setattr(outer_product, "LONGEST_MASK", 50)
    assert relative_error(mixer(x), expected) < 1e-12
    monkeypatch.setattr(outer_product, "LONGEST_MASK", 0)
    monkeypatch.setattr(numerics, "PART", 1)
    with torch.no_grad():
        assert relative_error(mixer(x), expected) < 1e-12


@pytest.mark.parametrize("tno_type", ["explicit", "s4d", "rtf", "modal"])
def test_filters_of_heads_begin_slowly(tno_type):
    """As exponentials of the time constants, so that heads learn to recall; keys begin one place late."""
    for causal in (True, False)[: 1 if tno_type == "modal" else 2]:
        fields = {"decay": None, "num_mixer_heads": 8, "num_filter_groups": 8, "rtf_num_denominators": None}
        model = seeded(TnnModel, tiny_config(tno_type, causal, **MIXED["multihyena"] | fields | {"num_modes": 8}))
        mixer = model.layers[0].mixer
        kernel, taps = mixer.tno.coefficients(50), mixer.short.taps.unflatten(0, (3, -1)).mean(1)
        lags = torch.arange(kernel.shape[1]) - (0 if causal else 49)
        assert relative_error(kernel, torch.exp(-lags.abs() / mixer.tno.time_constants(8)[:, None])) < 1e-2
        assert taps.argmax(1).tolist() == ([0, 1, 0] if causal else [1, 2, 1]), taps


def test_an_offloaded_cache():
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match="`past_key_values` must stay on the device .*, got an offloaded cache"):
        ShortConvolution(tiny_config(toeplitz_mixer="hyena")).forward(
            random(1, 1, 192), context=LayerContext(cache=cache)
        )


@pytest.mark.parametrize("name", MIXED)
def test_files_in_half_precision(name, tmp_path):
    """The operator and the short convolution stay in float32."""
    model = language_model(name).half()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    kept = {p.dtype for n, p in loaded.named_parameters() if ".mixer.tno." in n or ".mixer.short." in n}
    assert kept == {torch.float32} and loaded.model.layers[0].mixer.o_proj.weight.dtype is torch.float16
    assert relative_error(loaded(IDS).logits, model(IDS).logits) < 5e-2
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["toeplitz_mixer"] == name


def test_plan_of_tensor_parallelism():
    """It names modules that exist, those of attention and of each mixer too; the table has all names."""
    assert tuple(TOEPLITZ_MIXERS) == MIXERS and {"gtu", *MIXED} == set(MIXERS)
    for name in (*MIXED, *HYBRIDS):
        model = language_model(name)
        names = {part.replace(".0.", ".*.").replace(".1.", ".*.") for part, _ in model.named_modules()}
        assert model.tp_plan.keys() <= names
        assert name in HYBRIDS or "model.layers.*.mixer.tno" in model.tp_plan
        assert name in MIXED or model.tp_plan["model.layers.*.attention.k_proj"] == "colwise"


def test_what_cannot_be_divided_or_taken_apart():
    model = language_model("hyena")
    mesh = SimpleNamespace(ndim=1, get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    with pytest.raises(ValueError, match="`toeplitz_mixer` must be 'gtu' or 's4' for a divided text.*got 'hyena'"):
        SequenceParallel(model, mesh)
    with pytest.raises(ValueError, match="`layer_types` must be 'toeplitz' in all layers for a divided text.*tp_plan"):
        SequenceParallel(language_model("full"), mesh)
    with pytest.raises(ValueError, match="`toeplitz_mixer` must be 'gtu' or 's4' for one step.*got 'hyena'"):
        DecodingStep(model)


def test_one_step_of_s4():
    model = language_model("s4", eos_token_id=None).double()
    step = DecodingStep(model)
    states, found = step.empty(2), []
    with torch.no_grad():
        for position in range(12):
            logits, states = step(IDS[:, position : position + 1], states)
            found.append(logits)
        assert relative_error(torch.stack(found, dim=1), model(IDS[:, :12]).logits) < 1e-9
