"""Conversion to a recurrence: what it reports is what it does, and the result is a model like any other."""

import copy
import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import lively_language_model, relative_error, seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.tno import continue_sequence
from modeling_tnn.tools.recurrent import ORDERS, fit_layer, fit_recurrence

KERNELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.99},
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.95, "learnable_decay": True},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None, "max_position_embeddings": 64},
    "fd": {"tno_type": "fd", "fd_resolution": 256},
    "fd-cos": {"tno_type": "fd", "fd_resolution": 256, "fd_input": "cos", "fd_act": "gelu"},
}


@pytest.fixture(autouse=True)
def few_taps(monkeypatch):
    """Kernels without an end are fitted over 512 taps here, not 4096."""
    monkeypatch.setattr("modeling_tnn.tools.recurrent.MOST_TAPS", 512)


def operators(model):
    return [layer.mixer.tno for layer in model.base_model.layers]


@pytest.mark.parametrize("name", ["rpe", "rpe-learnable-decay", "fd"])
def test_tail_bound_holds(name):
    """The bound holds for the fit and the kernel far beyond the fitted taps."""
    model = lively_language_model(**KERNELS[name])
    converted, reports = model.to_recurrent(order=8, window=4)
    for original, operator, report in zip(operators(model), operators(converted), reports, strict=True):
        exact, fitted = original.coefficients(4000), operator.coefficients(4000)
        beyond = (fitted - exact)[:, report.taps :].abs().sum(1) / exact[:, : report.taps].abs().sum(1)
        assert beyond.max() <= report.tail_bound * (1 + 1e-6)


@pytest.mark.parametrize("decay", [0.6, 0.75, 0.88, *slow(0.5, 0.95)])
@torch.no_grad()
def test_what_is_stored_has_the_error_that_is_reported(decay):
    """Kernels of low numerical rank: numbers of higher orders would cancel each other, and rounded ones do not."""
    for dtype, options in itertools.product((torch.float32, torch.bfloat16), ({"order": 64}, {"tolerance": 1e-6})):
        model = seeded(TnnForCausalLM, tiny_config(decay=decay)).to(dtype)
        converted, reports = model.to_recurrent(window=16, **options)
        for original, operator, report in zip(operators(model), operators(converted), reports, strict=True):
            exact = original.coefficients(report.taps).double()
            error = (operator.coefficients(report.taps) - exact).norm() / exact.norm()
            assert error <= report.l2_layer * 1.001 + 1e-9 and report.l2_layer < 1e-6
            assert report.tail_bound < 1e-5 and operator.residues.abs().max() < 100 * exact.abs().max()
            assert torch.equal(operator.head, exact[:, :16].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_of_a_kernel_without_a_known_end(dtype):
    """A fit that equals it on further taps is taken for it; with too few states it does not, and has no bound."""
    operator = lively_language_model(tno_type="modal").to(dtype).model.layers[1].mixer.tno
    torch.nn.init.uniform_(operator.log_rate, -3, 0)
    for order, bounded in ((16, True), (4, False)):
        _, _, report = fit_layer(operator, order, 3, None, dtype)
        assert (report.tail_bound < 1e-6) == (report.l2_layer < 1e-6) == bounded
        assert bounded or report.tail_bound == math.inf


@pytest.mark.parametrize("taps, window", [(1, 16), (3, 3), (3, 16), (16, 16)])
def test_kernels_that_end_within_the_window(taps, window):
    """There is nothing to fit: the conversion is exact."""
    model = lively_language_model(tno_type="rpe", rpe_window=taps)
    converted, reports = model.to_recurrent(order=8, window=window)
    for original, operator, report in zip(operators(model), operators(converted), reports, strict=True):
        assert report.l2_layer < 1e-9
        assert relative_error(operator.coefficients(60), original.coefficients(60)) < 1e-9


def test_exponentials_are_found():
    """A kernel that is a recurrence of order 6: two real poles, two pairs."""
    poles = torch.tensor([0.9, -0.7, 0.95 * torch.e ** (0.3j), 0.8 * torch.e ** (2j)], dtype=torch.complex128)
    residues = torch.randn(20, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    taps = (residues @ poles[:, None] ** torch.arange(200)).real
    fit = fit_recurrence(taps, 6)
    assert len(fit.poles) == 4
    assert relative_error(fit.taps(200), taps) < 1e-9
    found = torch.sort(torch.view_as_real(fit.poles).flatten()).values
    assert relative_error(found, torch.sort(torch.view_as_real(poles).flatten()).values) < 1e-7


@pytest.mark.slow
def test_float32_recurrence_stays_with_its_float64_self():
    converted = lively_language_model(**KERNELS["rpe"]).to_recurrent()[0].requires_grad_(False)
    operator = operators(converted)[0]
    v = torch.randn(1, 4096, operator.channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for dtype in (torch.float64, torch.float32):
        single = copy.deepcopy(operator).to(dtype)
        layer = TnnCacheLayer()
        steps = [continue_sequence(single, layer, v[:, t : t + 1].to(dtype)) for t in range(v.shape[1])]
        outputs.append(torch.cat(steps, dim=1))
    assert relative_error(outputs[1], outputs[0]) < 1e-5


def test_other_weights_and_settings_are_kept():
    model = seeded(TnnForSequenceClassification, tiny_config(num_labels=3)).train()
    converted, _ = model.to_recurrent(order=8)
    assert converted.training and converted.num_labels == 3
    original, copied = model.state_dict(), converted.state_dict()
    assert all(torch.equal(original[name], copied[name]) for name in original if ".tno." not in name)
    tied = lively_language_model(tno_type="rpe").to_recurrent(order=8)[0]
    assert tied.lm_head.weight is not tied.model.embed_tokens.weight


def test_tolerance_takes_the_smallest_order():
    model = lively_language_model(**KERNELS["rpe"])
    _, reports = model.to_recurrent(tolerance=1e-3)
    for layer, report in enumerate(reports):
        assert report.order in ORDERS and report.l2_layer <= 1e-3
        if report.order > ORDERS[0]:
            smaller = ORDERS[ORDERS.index(report.order) - 1]
            assert model.to_recurrent(order=smaller)[1][layer].l2_layer > 1e-3


def test_refused():
    """Wrapped weights too: they had been left at random values."""
    for options, message in (
        ({"tolerance": 1e-300}, "`tolerance` must be .* layer 0 at the highest order 128, got 1e-300.*larger"),
        ({"order": 0}, "`order` must be a whole number from 1 up, got 0"),
        ({"window": 0}, "`window` must be a whole number from 1 up, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            lively_language_model(**KERNELS["rpe"]).to_recurrent(**options)
    with pytest.raises(ValueError, match="`causal` must be True for to_recurrent"):
        seeded(TnnForMaskedLM, tiny_config(causal=False)).to_recurrent()
    model, ids = lively_language_model(), torch.arange(40)[None]
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mixer.o_proj)
    with pytest.raises(ValueError, match="plain tensors .*o_proj.* remove parametrizations"):
        model.to_recurrent(order=8)
    torch.nn.utils.parametrize.remove_parametrizations(model.model.layers[1].mixer.o_proj, "weight")
    assert relative_error(model.to_recurrent(order=64)[0](ids).logits, model(ids).logits) < 1e-3


def test_offloaded_and_quantized_weights_are_refused(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    seeded(TnnForCausalLM, tiny_config(hidden_size=64, eos_token_id=None)).save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())
    )
    packed = pytest.importorskip("torch.ao.quantization").quantize_dynamic(seeded(TnnForCausalLM, tiny_config()))
    for model in (quantized, packed):
        with pytest.raises(ValueError, match="offloaded, quantized or sharded"):
            model.to_recurrent(order=8)
    with torch.device("meta"), pytest.raises(ValueError, match="offloaded, quantized or sharded"):
        TnnForCausalLM(tiny_config()).to_recurrent(order=8)
