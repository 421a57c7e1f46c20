"""The gated Toeplitz unit, Hyena and the mixer of S4's blocks: their definitions, packing, graphs, files, errors.

Every way of decoding is in `test_equalities.py` and its neighbours.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DynamicCache

from helpers import gaussian_operator
from helpers.hybrids import HYBRIDS
from helpers.mixers import (
    IDS,
    MIXED,
    RESTATED,
    MixerTests,
    assert_is_definition,
    gtu_by_definition,
    hyena_by_definition,
    mixer_of,
    s4_by_definition,
)
from helpers.models import lively_language_model, random, relative_error, seeded, tiny_config
from modeling_tnn import DecodingStep, SequenceParallel, TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.configuration_tnn import MIXERS
from modeling_tnn.mixers import ShortConvolution
from modeling_tnn.modeling_tnn import TOEPLITZ_MIXERS
from modeling_tnn.tno import Pass

EVERY_MIXER = pytest.mark.parametrize("name", MIXED)
POSITIONS = torch.cat([torch.arange(n) for n in (7, 9, 1, 23)]).expand(2, 40)


class TestGatedToeplitzUnit(MixerTests):
    definition = staticmethod(gtu_by_definition)


class TestHyena(MixerTests):
    fields = MIXED["hyena"]
    definition = staticmethod(hyena_by_definition)


class TestS4(MixerTests):
    fields = MIXED["s4"]
    silent = ("glu_norm.weight", "glu_norm.gate")  # it has no GLU
    definition = staticmethod(s4_by_definition)


def language_model(name, causal=True, tno_type="rtf", **fields):
    fields = {"hidden_dropout_prob": 0.0} | (MIXED | HYBRIDS)[name] | fields
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields))


def test_the_table_has_all_names():
    assert tuple(TOEPLITZ_MIXERS) == MIXERS and {"gtu", *MIXED} == set(MIXERS)


@pytest.mark.parametrize("mixer", [TestHyena, TestS4])
def test_with_every_operator(mixer, variant):
    assert_is_definition(mixer.definition, mixer_of(mixer.fields, *variant), 9)


def test_other_sizes_and_operators():
    """An operator that the user has registered, too."""
    assert gaussian_operator.GaussianOperator
    sizes = [(1, None, True), (2, 3, True), (4, None, True), (5, None, False)]
    for taps, rank, causal in sizes:
        mixer = mixer_of(MIXED["hyena"], "rpe", causal, short_conv_kernel=taps, hyena_rank=rank)
        assert_is_definition(hyena_by_definition, mixer, 9)
    assert_is_definition(hyena_by_definition, mixer_of(MIXED["hyena"], "gaussian"), 17)


@EVERY_MIXER
def test_restated_from_the_papers(name):
    """Nothing of the package computes the expected numbers, the filters of RTF included."""
    fields = {"rtf_num_denominators": 2, "hidden_size": 8, "max_position_embeddings": 40}
    mixer = mixer_of(MIXED[name], "rtf", **fields)
    weights = {name: parameter.detach().numpy() for name, parameter in mixer.named_parameters()}
    for length in (1, 17, 40):
        x = random(1, length, 8).detach()
        expected = torch.from_numpy(np.ascontiguousarray(RESTATED[name](weights, x[0].numpy(), 40)))
        assert relative_error(mixer(x)[0], expected) < 1e-10


@pytest.mark.parametrize("taps, causal", [(1, True), (3, True), (4, True), (1, False), (3, False), (7, False)])
def test_the_short_convolution_is_its_dense_matrix(taps, causal):
    config = tiny_config("rpe", causal, short_conv_kernel=taps, toeplitz_mixer="hyena")
    operator = seeded(ShortConvolution, config).double()
    operator.reset_parameters()
    for length in (1, 2, 3, 17, 63):
        v = random(2, length, operator.channels)
        dense = torch.einsum("dij,bjd->bid", operator.dense(length), v)
        assert relative_error(operator.matmul(v), dense) < 1e-12
        assert relative_error(operator(v), dense + operator.bias) < 1e-12
    assert not operator.bias.eq(0).any()


@pytest.mark.parametrize(
    "name, causal, masked",
    [("hyena", True, True), ("s4", False, False), pytest.param("full", True, True, marks=pytest.mark.slow)],
)
def test_packed_rows_in_one_graph(name, causal, masked):
    """They are alone, as without a graph, which is the same for other documents; padding before, inside, behind."""
    torch._dynamo.reset()
    model = language_model(name, causal, use_cache=False).train()
    backend = CompileCounterWithBackend("eager")
    call, mask = torch.compile(model, backend=backend, fullgraph=True), torch.ones_like(IDS)
    mask[0, :3] = mask[1, 11:13] = mask[1, 35:] = 0
    real = mask.bool() if masked else torch.ones_like(IDS).bool()
    for positions in (POSITIONS + 0, torch.arange(40).expand(2, 40) % 16):
        given = {"position_ids": positions} | ({"attention_mask": mask} if masked else {})
        found, expected = (one(input_ids=IDS, **given).logits[real] for one in (call, model))
        parts = (torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in (found, expected))
        for one, other in zip([found, *next(parts)], [expected, *next(parts)], strict=True):
            assert relative_error(one, other) < 5e-6
    assert len(backend.graphs) == 1
    torch._dynamo.reset()


def test_a_pass_that_broke_off(monkeypatch):
    """The states of one layer differ: noticed before the next pass."""
    model = language_model("hyena")
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
        monkeypatch.setattr(model.model.layers[0].mixer.tno, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(IDS, past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="`past_key_values` is incomplete"):
            model(IDS, past_key_values=cache)


def test_an_offloaded_cache():
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match="`past_key_values` must stay on the device .*, got an offloaded cache"):
        ShortConvolution(tiny_config(toeplitz_mixer="hyena")).forward(random(1, 1, 192), passed=Pass(cache=cache))


def test_conversion():
    """The operator becomes a recurrence, the mixer stays."""
    model = lively_language_model(tno_type="rpe", decay=0.8, **MIXED["hyena"])
    converted, reports = model.to_recurrent(order=32, window=8)
    assert len(reports) == 2 and converted.config.tno_type == "modal" and converted.config.toeplitz_mixer == "hyena"
    with torch.no_grad():
        assert relative_error(converted(IDS).logits, model(IDS).logits) < 1e-3


@EVERY_MIXER
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


def test_a_model_of_gated_units_is_as_it_was():
    assert not any("short" in name for name in TnnForCausalLM(tiny_config()).state_dict())


@pytest.mark.parametrize("name", [*MIXED, *HYBRIDS])
def test_plan_of_tensor_parallelism(name):
    """It names modules that exist, those of attention too, and none of another mixer."""
    model = language_model(name)
    names = {part.replace(".0.", ".*.").replace(".1.", ".*.") for part, _ in model.named_modules()}
    assert model.tp_plan.keys() <= names
    if name in MIXED:
        assert not any(".mixer." in part for part in model.tp_plan)
    else:
        assert model.tp_plan["model.layers.*.attention.k_proj"] == "colwise"


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
