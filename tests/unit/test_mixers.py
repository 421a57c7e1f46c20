"""Hyena and the mixer of S4's blocks around every operator: their definitions, packing, graphs, files, errors.

Their promises on padding, chunks, crops, packing and saving are among those of `test_properties.py`; every way of
decoding is in `test_equalities.py` and its neighbours.
"""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DynamicCache

from helpers import gaussian_operator
from helpers.mixers import DEFINITIONS, MIXED, RESTATED
from helpers.models import (
    CAUSAL,
    VARIANTS,
    checkpoint_activations,
    exhaustive,
    lively_language_model,
    relative_error,
    seeded,
    tiny_config,
)
from modeling_tnn import DecodingStep, SequenceParallel, TnnForCausalLM, TnnForMaskedLM, TnnModel
from modeling_tnn.configuration_tnn import MIXERS
from modeling_tnn.mixers import ShortConvolution
from modeling_tnn.modeling_tnn import TOEPLITZ_MIXERS
from modeling_tnn.tno import Pass

EVERY_MIXER = pytest.mark.parametrize("name", MIXED)
GRAPHS = [("hyena", True, True), ("s4", False, False), *exhaustive(("hyena", False, True), ("s4", True, True))]
LENGTHS = (1, 2, 3, 17, 63)
SMALL = {"hidden_size": 6, "rtf_num_denominators": None, "num_hidden_layers": 1, "ski_rank": 5}
IDS = torch.arange(80).view(2, 40) % 90 + 5
STARTS = (0, 7, 16, 17)
POSITIONS = torch.cat([torch.arange(n) for n in (7, 9, 1, 23)]).expand(2, 40)


def mixer_of(name, tno_type, causal, **fields):
    """A mixer in float64, no parameter at its initial value."""
    config = tiny_config(tno_type, causal, **SMALL | MIXED[name] | {"hyena_rank": 5} | fields)
    mixer = seeded(TnnModel, config).layers[0].mixer.double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def noise(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def language_model(name, causal=True, tno_type="rtf", **fields):
    head = TnnForCausalLM if causal else TnnForMaskedLM
    return seeded(head, tiny_config(tno_type, causal, hidden_dropout_prob=0.0, **MIXED[name] | fields))


def results(call, model, **inputs):
    """The logits, and the gradients of all parameters."""
    logits = call(input_ids=IDS, **inputs).logits
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


def assert_same(found, expected, tolerance=5e-6):
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < tolerance


def test_the_table_has_all_names():
    assert tuple(TOEPLITZ_MIXERS) == MIXERS and {"gtu", *MIXED} == set(MIXERS)


@EVERY_MIXER
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_mixer_is_its_definition(name, variant, length):
    """Values and all gradients, with every operator."""
    mixer = mixer_of(name, *variant)
    x, weight = noise(2, length, 6).requires_grad_(), noise(2, length, 6)
    found, expected = mixer(x), DEFINITIONS[name](mixer, x)
    assert relative_error(found, expected) < 1e-10
    inputs = [x, *mixer.parameters()]
    kept = {"allow_unused": True, "materialize_grads": True}
    found, expected = (torch.autograd.grad((y * weight).sum(), inputs, **kept) for y in (found, expected))
    scale = max(one.abs().max().item() for one in expected)
    assert max(relative_error(a, b, scale) for a, b in zip(found, expected, strict=True)) < 1e-9


@pytest.mark.parametrize("taps, rank, causal", [(1, None, True), (2, 3, True), (4, None, True), (5, None, False)])
def test_other_sizes(taps, rank, causal):
    mixer = mixer_of("hyena", "rpe", causal, short_conv_kernel=taps, hyena_rank=rank)
    x = noise(2, 9, 6)
    assert relative_error(mixer(x), DEFINITIONS["hyena"](mixer, x)) < 1e-10


def test_an_operator_of_the_user():
    assert gaussian_operator.GaussianOperator
    mixer, x = mixer_of("hyena", "gaussian", True), noise(2, 17, 6)
    assert relative_error(mixer(x), DEFINITIONS["hyena"](mixer, x)) < 1e-10


@EVERY_MIXER
@pytest.mark.parametrize("length", [1, 17, 40])
def test_restated_from_the_papers(name, length):
    """Nothing of the package computes the expected numbers, the filters of RTF included."""
    mixer = mixer_of(name, "rtf", True, rtf_num_denominators=2, hidden_size=8, max_position_embeddings=40)
    weights = {name: parameter.detach().numpy() for name, parameter in mixer.named_parameters()}
    x = noise(1, length, 8)
    expected = torch.from_numpy(np.ascontiguousarray(RESTATED[name](weights, x[0].numpy(), 40)))
    assert relative_error(mixer(x)[0], expected) < 1e-10


@pytest.mark.parametrize("taps, causal", [(1, True), (3, True), (4, True), (1, False), (3, False), (7, False)])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_short_convolution_is_its_dense_matrix(taps, causal, length):
    config = tiny_config("rpe", causal, short_conv_kernel=taps, toeplitz_mixer="hyena")
    operator = seeded(ShortConvolution, config).double()
    operator.reset_parameters()
    v = noise(2, length, operator.channels)
    dense = torch.einsum("dij,bjd->bid", operator.dense(length), v)
    assert relative_error(operator.matmul(v), dense) < 1e-12
    assert relative_error(operator(v), dense + operator.bias) < 1e-12
    assert not operator.bias.eq(0).any()


@pytest.mark.parametrize("name, causal, masked", GRAPHS)
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
        assert_same([found, *next(parts)], [expected, *next(parts)])
    assert len(backend.graphs) == 1
    torch._dynamo.reset()


@EVERY_MIXER
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_alone(name, causal):
    model = language_model(name, causal, use_cache=False)
    ends = (*STARTS[1:], 40)
    expected = torch.cat([model(IDS[:, a:b]).logits for a, b in zip(STARTS, ends, strict=True)], dim=1)
    gradients = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
    assert_same(results(model, model, position_ids=POSITIONS), [expected, *gradients])
    assert relative_error(model(IDS).logits, expected) > 1e-3


@EVERY_MIXER
def test_checkpointed_activations(name):
    model = language_model(name, use_cache=False).train()
    expected = results(model, model)
    checkpoint_activations(model)
    assert_same(results(model, model), expected)


@EVERY_MIXER
def test_a_continued_text(name):
    model = language_model(name)
    with torch.no_grad():
        cache = model(IDS[:, :30], use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
    expected = model(IDS, use_cache=False).logits[:, 30:]
    logits = model(IDS[:, 30:], past_key_values=cache, use_cache=True).logits
    assert relative_error(logits, expected) < 1e-4
    with torch.no_grad():  # an equal model continues the copy
        again = copy.deepcopy(model)(IDS[:, 30:], past_key_values=twin).logits
    assert relative_error(again, logits) < 1e-5


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
        ShortConvolution(tiny_config(toeplitz_mixer="hyena")).forward(noise(1, 1, 192), passed=Pass(cache=cache))


@pytest.mark.parametrize("tno_type", ["rpe", *exhaustive(*(name for name in CAUSAL if name != "rpe"))])
def test_conversion(tno_type):
    """The operator becomes a recurrence, the mixer stays."""
    model = lively_language_model(tno_type=tno_type, decay=0.8, **MIXED["hyena"])
    converted, reports = model.to_recurrent(order=32, window=8)
    assert len(reports) == 2 and converted.config.tno_type == "modal" and converted.config.toeplitz_mixer == "hyena"
    with torch.no_grad():
        assert relative_error(converted(IDS).logits, model(IDS).logits) < 1e-3


@EVERY_MIXER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files(name, dtype, tmp_path):
    model = language_model(name).to(dtype)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    kept = {p.dtype for n, p in loaded.named_parameters() if ".mixer.tno." in n or ".mixer.short." in n}
    assert kept == {torch.float32} and loaded.model.layers[0].mixer.o_proj.weight.dtype is dtype
    assert relative_error(loaded(IDS).logits, model(IDS).logits) < (1e-6 if dtype is torch.float32 else 5e-2)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["toeplitz_mixer"] == name


def test_a_model_of_gated_units_is_as_it_was():
    assert not any("short" in name for name in TnnForCausalLM(tiny_config()).state_dict())


@EVERY_MIXER
def test_plan_of_tensor_parallelism(name):
    """It names modules that exist, and none of the mixer."""
    model = language_model(name)
    names = {part.replace(".0.", ".*.").replace(".1.", ".*.") for part, _ in model.named_modules()}
    assert model.tp_plan.keys() <= names and not any(".mixer." in part for part in model.tp_plan)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"toeplitz_mixer": "mamba"}, "`toeplitz_mixer` must be one of 'gtu', 'hyena', 's4', got 'mamba'"),
        ({"short_conv_kernel": 0}, r"`short_conv_kernel` must be in \[1, 64\], got 0"),
        ({"hyena_rank": 0}, r"`hyena_rank` must be in \[1, .*\] or None, got 0"),
        (
            {"toeplitz_mixer": "hyena", "causal": False, "short_conv_kernel": 4},
            "`short_conv_kernel` must be odd with causal=False, got 4",
        ),
        (
            {"toeplitz_mixer": "hyena", "causal": False, "spatial_dims": 2},
            "`spatial_dims` must be 1 with toeplitz_mixer='hyena', .*, got 2",
        ),
        ({"toeplitz_mixer": "s4"}, "`gtu_expansion` must be 1 with toeplitz_mixer='s4', .*, got 2"),
        (
            {"toeplitz_mixer": "s4", "gtu_expansion": 1, "gtu_norm": True},
            "`gtu_norm` must be False with toeplitz_mixer='s4', .*, got True",
        ),
        (
            {"toeplitz_mixer": "hyena", "hyena_norm": True, "gtu_norm": True},
            "`hyena_norm` must be False with gtu_norm, .*, got True",
        ),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_what_cannot_be_divided_or_taken_apart():
    model = language_model("hyena")
    mesh = SimpleNamespace(ndim=1, get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: 2)
    with pytest.raises(ValueError, match="`toeplitz_mixer` must be 'gtu' or 's4' for a divided text.*got 'hyena'"):
        SequenceParallel(model, mesh)
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
