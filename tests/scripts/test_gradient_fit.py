"""The gradient fit of a rational function to a kernel, beside the direct one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import lively_language_model, seeded, tiny_config
from helpers.scripts import TEXT, run, save_model
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from tnn_scripts.common.gradient_fit import convert_by_gradient, fit_operator


def test_recovers_a_rational_kernel():
    """A kernel that is a decaying exponential in every channel is found at order 1, and its pole is its rate."""
    operator = seeded(TnnForCausalLM, tiny_config(decay=0.8)).double().model.layers[0].gtu.tno
    with torch.no_grad():  # a position encoder that says the same of every lag
        operator.rpe.out.linear.weight.zero_()
        operator.rpe.out.linear.bias.uniform_(0.5, 1.5)
    fitted, report = fit_operator(operator, tiny_config(decay=0.8), 1, 1, steps=300, learning_rate=0.02)
    assert report["l2_worst"] < 1e-3 and report["largest_pole"] == pytest.approx(0.8, abs=1e-3)
    torch.testing.assert_close(fitted.coefficients(20), operator.coefficients(20), rtol=1e-3, atol=1e-3)


def test_more_steps_fit_better():
    model = seeded(TnnForCausalLM, tiny_config(decay=0.9, num_hidden_layers=1))
    errors = [convert_by_gradient(model, 6, 4, steps, 0.03)[1][0]["l2_layer"] for steps in (1, 60)]
    assert errors[1] < 0.5 * errors[0]


def test_script_decodes_with_the_fit(tmp_path):
    folder, text, output = save_model(tmp_path / "model", decay=0.9), tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT * 60)
    run("to_recurrent.py", "--model_name_or_path", folder, "--output_dir", output, "--dataset_name", text, "--rows", 1,
        "--fit", "gradient", "--order", 6, "--steps", 40, "--length", 64)  # fmt: skip
    report = json.loads((output / "conversion.json").read_text())
    assert report["fit"] == "gradient" and report["modes"] is None
    assert all(layer["l2_layer"] < 1 and layer["largest_pole"] < 1 for layer in report["layers"])
    assert all(0 < layer["direct_l2_layer"] < 1 for layer in report["layers"])
    converted, prompt = AutoModelForCausalLM.from_pretrained(output), torch.tensor([[5, 6, 7]])
    assert (converted.config.tno_type, converted.config.converted_from) == ("rtf", "rpe")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = converted.generate(prompt, use_cache=False, **options)
    assert torch.equal(converted.generate(prompt, **options), expected)


def test_refused_models():
    with pytest.raises(ValueError, match="not a recurrence already, got tno_type='rtf' with causal=True"):
        convert_by_gradient(lively_language_model(tno_type="rtf"), 4, 4, 1, 0.1)
    with pytest.raises(ValueError, match="tno_type='rpe' with causal=False"):
        convert_by_gradient(seeded(TnnForMaskedLM, tiny_config(causal=False)), 4, 4, 1, 0.1)
