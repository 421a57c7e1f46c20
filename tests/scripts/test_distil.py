"""The gradient fits of recurrences to a kernel (`docs/research/distil.py`), beside the direct one."""

import sys
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import lively_language_model, seeded, tiny_config
from helpers.scripts import ROOT, TEXT, read, save_model, words
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tools.recurrent import kernel_to_fit

sys.path.append(str(ROOT / "docs" / "research"))
distil = import_module("distil")
EVERY_FIT = pytest.mark.parametrize("fit", distil.FITS)


def operator_with(decay: float):
    return seeded(TnnForCausalLM, tiny_config(decay=decay)).double().model.layers[0].mixer.tno


@EVERY_FIT
def test_recovers_a_decaying_kernel(fit):
    """A kernel that is a decaying exponential in every channel is found, and its pole is the largest one."""
    operator = operator_with(0.8)
    with torch.no_grad():  # a position encoder that says the same of every lag
        operator.rpe.out.linear.weight.zero_()
        operator.rpe.out.linear.bias.uniform_(0.5, 1.5)
    # A pair of complex poles reaches a real one only in the limit.
    order, precision = (1, 1e-3) if fit == "gradient" else (2, 2e-2)
    fitted, report = distil.fit_operator(operator, tiny_config(decay=0.8), distil.FITS[fit], order, 1, 300, 0.02)
    assert report["l2_worst"] < precision and report["largest_pole"] == pytest.approx(0.8, abs=precision)
    torch.testing.assert_close(fitted.coefficients(20), operator.coefficients(20), rtol=precision, atol=precision)


@EVERY_FIT
def test_errors_of_the_report(fit):
    """They are those of the taps, by definition, and fall with more steps."""
    operator, given = operator_with(0.9), (tiny_config(decay=0.9), distil.FITS[fit], 6, 4)
    first = distil.fit_operator(operator, *given, steps=1, learning_rate=0.03)[1]
    fitted, report = distil.fit_operator(operator, *given, steps=60, learning_rate=0.03)
    assert report["l2_layer"] < 0.5 * first["l2_layer"]
    taps = kernel_to_fit(operator, 4)
    error = fitted.coefficients(taps.shape[1]) - taps
    relative = error.norm(dim=1) / taps.norm(dim=1)
    expected = {"mse": error.square().mean(), "l2_layer": error.norm() / taps.norm(), "l2_worst": relative.max()}
    expected["mse_of_unit_kernels"] = (relative.square() / taps.shape[1]).mean()
    assert {name: report[name] for name in expected} == pytest.approx({k: v.item() for k, v in expected.items()})


@EVERY_FIT
def test_program_decodes_with_the_fit(fit, tmp_path, monkeypatch):
    folder, output = save_model(tmp_path / "model", decay=0.9), tmp_path / "out"
    (tmp_path / "text.txt").write_text(TEXT * 60)
    options = f"--model_name_or_path {folder} --output_dir {output} --dataset_name {tmp_path}/text.txt --rows 1"
    options += f" --fit {fit} --order 6 --steps 40 --block_size 64"
    monkeypatch.setattr(sys, "argv", ["distil.py", *words(options)])
    distil.main()
    report = read(output, "conversion")
    assert (report["fit"], report["steps"], report["modes"]) == (fit, 40, None)
    for layer in report["layers"]:
        assert layer["l2_layer"] < 1 and layer["largest_pole"] < 1 and 0 < layer["direct_l2_layer"] < 1
    converted, prompt = AutoModelForCausalLM.from_pretrained(output), torch.tensor([[5, 6, 7]])
    assert (converted.config.tno_type, converted.config.converted_from) == (distil.FITS[fit].tno_type, "rpe")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = converted.generate(prompt, use_cache=False, **options)
    assert torch.equal(converted.generate(prompt, **options), expected)


def test_settings_of_the_model_stay():
    """All but the operator is that of the model: its dtype, its length and its options of generation."""
    model = lively_language_model().bfloat16()
    model.generation_config.update(max_new_tokens=7, do_sample=True, top_p=0.8)
    converted, _ = distil.convert_by_gradient(model, 4, 4, 1, 0.1, "gradient")
    assert converted.dtype is torch.bfloat16 and converted.generation_config == model.generation_config
    assert converted.config.max_position_embeddings == model.config.max_position_embeddings
    assert all(one.dtype is torch.float32 for one in converted.model.layers[0].mixer.tno.parameters())
    found = dict(converted.named_parameters())
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters() if ".tno." not in name)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: lively_language_model(tno_type="rtf"), "already, got tno_type='rtf' with causal=True"),
    (lambda: seeded(TnnForMaskedLM, tiny_config(causal=False)), "tno_type='rpe' with causal=False"),
])  # fmt: skip
def test_refused_models(build, message):
    with pytest.raises(ValueError, match=message):
        distil.convert_by_gradient(build(), 4, 4, 1, 0.1)
