"""The gradient fits of recurrences to a kernel, beside the direct one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import lively_language_model, seeded, tiny_config
from helpers.scripts import TEXT, read, run, save_model
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tools.recurrent import kernel_to_fit
from tnn_scripts.common.gradient_fit import FITS, convert_by_gradient, fit_operator

EVERY_FIT = pytest.mark.parametrize("fit", FITS)
OPERATORS = {"gradient": "rtf", "modal-gradient": "s4d"}


@EVERY_FIT
def test_recovers_a_decaying_kernel(fit):
    """A kernel that is a decaying exponential in every channel is found, and its pole is the largest one."""
    operator = seeded(TnnForCausalLM, tiny_config(decay=0.8)).double().model.layers[0].mixer.tno
    with torch.no_grad():  # a position encoder that says the same of every lag
        operator.rpe.out.linear.weight.zero_()
        operator.rpe.out.linear.bias.uniform_(0.5, 1.5)
    # A pair of complex poles reaches a real one only in the limit.
    order, precision = (1, 1e-3) if fit == "gradient" else (2, 2e-2)
    fitted, report = fit_operator(operator, tiny_config(decay=0.8), FITS[fit], order, 1, steps=300, learning_rate=0.02)
    assert report["l2_worst"] < precision and report["largest_pole"] == pytest.approx(0.8, abs=precision)
    torch.testing.assert_close(fitted.coefficients(20), operator.coefficients(20), rtol=precision, atol=precision)


@EVERY_FIT
def test_errors_of_the_report(fit):
    """They are those of the taps, by definition, and fall with more steps."""
    operator = seeded(TnnForCausalLM, tiny_config(decay=0.9)).double().model.layers[0].mixer.tno
    first = fit_operator(operator, tiny_config(decay=0.9), FITS[fit], 6, 4, steps=1, learning_rate=0.03)[1]
    fitted, report = fit_operator(operator, tiny_config(decay=0.9), FITS[fit], 6, 4, steps=60, learning_rate=0.03)
    assert report["l2_layer"] < 0.5 * first["l2_layer"]
    taps = kernel_to_fit(operator, 4)
    error = fitted.coefficients(taps.shape[1]) - taps
    relative = error.norm(dim=1) / taps.norm(dim=1)
    assert report["mse"] == pytest.approx(error.square().mean().item())
    assert report["mse_of_unit_kernels"] == pytest.approx((relative.square() / taps.shape[1]).mean().item())
    assert report["l2_layer"] == pytest.approx((error.norm() / taps.norm()).item())
    assert report["l2_worst"] == pytest.approx(relative.max().item())


@EVERY_FIT
def test_script_decodes_with_the_fit(fit, tmp_path):
    folder, output = save_model(tmp_path / "model", decay=0.9), tmp_path / "out"
    (tmp_path / "text.txt").write_text(TEXT * 60)
    run("to_recurrent", f"--model_name_or_path {folder} --output_dir {output} --dataset_name {tmp_path}/text.txt",
        f"--rows 1 --fit {fit} --order 6 --steps 40 --block_size 64")  # fmt: skip
    report = read(output, "conversion")
    assert (report["fit"], report["steps"], report["modes"]) == (fit, 40, None)
    assert all(layer["l2_layer"] < 1 and layer["largest_pole"] < 1 for layer in report["layers"])
    assert all(0 < layer["direct_l2_layer"] < 1 for layer in report["layers"])
    converted, prompt = AutoModelForCausalLM.from_pretrained(output), torch.tensor([[5, 6, 7]])
    assert (converted.config.tno_type, converted.config.converted_from) == (OPERATORS[fit], "rpe")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = converted.generate(prompt, use_cache=False, **options)
    assert torch.equal(converted.generate(prompt, **options), expected)


@EVERY_FIT
def test_settings_of_the_model_stay(fit):
    """All but the operator is that of the model: its dtype, its length and its options of generation."""
    model = lively_language_model().bfloat16()
    model.generation_config.update(max_new_tokens=7, do_sample=True, top_p=0.8)
    converted, _ = convert_by_gradient(model, 4, 4, 1, 0.1, fit)
    assert converted.dtype is torch.bfloat16 and converted.generation_config == model.generation_config
    assert converted.config.max_position_embeddings == model.config.max_position_embeddings
    assert all(one.dtype is torch.float32 for one in converted.model.layers[0].mixer.tno.parameters())
    mixers = {name for name, _ in model.named_parameters() if ".tno." not in name}
    given, found = dict(model.named_parameters()), dict(converted.named_parameters())
    assert all(torch.equal(found[name], given[name]) for name in mixers)


def test_refused_models():
    with pytest.raises(ValueError, match="`fit` must be one of gradient, modal-gradient, got 'direct'"):
        convert_by_gradient(lively_language_model(), 4, 4, 1, 0.1, "direct")
    with pytest.raises(ValueError, match="not a recurrence already, got tno_type='rtf' with causal=True"):
        convert_by_gradient(lively_language_model(tno_type="rtf"), 4, 4, 1, 0.1)
    with pytest.raises(ValueError, match="tno_type='rpe' with causal=False"):
        convert_by_gradient(seeded(TnnForMaskedLM, tiny_config(causal=False)), 4, 4, 1, 0.1)
