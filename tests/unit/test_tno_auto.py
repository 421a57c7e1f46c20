"""The table of operators, and operators from outside the package."""

import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import processes
from helpers.gaussian_operator import GaussianOperator
from helpers.models import seeded, tiny_config
from helpers.operators import OperatorTests
from modeling_tnn import TnnConfig, TnnForCausalLM, ToeplitzOperator, register_operator
from modeling_tnn.tno_auto import BUILT_IN, OPERATORS, build_tno


class TestGaussian(OperatorTests):
    tno_type = "gaussian"
    fields = {"num_gaussians": 3}


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.delitem(OPERATORS, "gaussian")


def test_fields_of_an_operator_are_kept(tmp_path):
    config = TnnConfig(tno_type="gaussian", num_gaussians=7, hidden_size=8)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.tno_type, loaded.num_gaussians) == ("gaussian", 7)
    assert build_tno(loaded).amplitudes.shape[1] == 7


def test_a_checkpoint_without_its_operator(tmp_path, unregistered):
    """The saved folder says what it needs, and the error names the module to import."""
    OPERATORS["gaussian"] = GaussianOperator
    seeded(TnnForCausalLM, tiny_config("gaussian")).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["tno_class"] == "helpers.gaussian_operator.GaussianOperator" and tiny_config().tno_class is None
    del OPERATORS["gaussian"]
    message = "saved with the operator helpers.gaussian_operator.GaussianOperator: import its module first"
    for load in (AutoConfig, AutoModelForCausalLM, TnnForCausalLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)
    config = tiny_config()
    vars(config)["tno_type"] = "dct"  # an assignment is refused by the configuration
    with pytest.raises(ValueError, match="'rpe', 'fd', 'ski', 'rtf', .*, 'explicit', 'hyena', .*got 'dct'"):
        build_tno(config)


def test_another_process(tmp_path):
    model = seeded(TnnForCausalLM, tiny_config("gaussian"))
    model.save_pretrained(tmp_path)
    code = f"""import helpers.gaussian_operator, modeling_tnn, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(model(torch.arange(3, 13)[None]).logits.sum().item())"""
    expected = model(torch.arange(3, 13)[None]).logits.sum().item()
    assert float(processes.run([sys.executable, "-c", code]).stdout) == pytest.approx(expected, rel=1e-5)


def test_to_recurrent():
    model = seeded(TnnForCausalLM, tiny_config("gaussian")).double()
    converted, reports = model.to_recurrent(order=16)
    assert (converted.config.tno_type, converted.config.tno_class) == ("modal", None)
    assert converted.config.converted_from == "gaussian" and max(one.l2_layer for one in reports) < 1e-2


def test_registration(unregistered, monkeypatch):
    register_operator("gaussian", GaussianOperator)
    monkeypatch.setattr(GaussianOperator, "supports_bidirectional", False)
    with pytest.raises(ValueError, match="`causal` must be True with tno_type='gaussian', got False"):
        TnnConfig(tno_type="gaussian", causal=False)
    register_operator(
        "gaussian", type("GaussianOperator", (GaussianOperator,), {"__module__": "helpers.gaussian_operator"})
    )
    for name, cls, error in [
        ("rpe", GaussianOperator, ValueError),
        ("gaussian", type("Other", (ToeplitzOperator,), {}), ValueError),
        ("", GaussianOperator, TypeError),
        ("new", torch.nn.Module, TypeError),
        ("new", GaussianOperator(tiny_config("gaussian")), TypeError),
    ]:
        with pytest.raises(error):
            register_operator(name, cls)
    assert set(OPERATORS) == {*BUILT_IN, "gaussian"}
