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


def test_unknown_operator():
    config = tiny_config()
    vars(config)["tno_type"] = "dct"  # an assignment is refused by the configuration
    with pytest.raises(ValueError, match="'rpe', 'fd', 'ski', 'rtf', 's4d', 'modal', 'explicit'.*, got 'dct'"):
        build_tno(config)


def test_fields_of_an_operator_are_kept(tmp_path):
    config = TnnConfig(tno_type="gaussian", num_gaussians=7, hidden_size=8)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.tno_type, loaded.num_gaussians) == ("gaussian", 7)
    assert build_tno(loaded).amplitudes.shape[1] == 7


def test_a_checkpoint_without_its_operator(tmp_path, unregistered):
    """The error names the module to import."""
    OPERATORS["gaussian"] = GaussianOperator
    seeded(TnnForCausalLM, tiny_config("gaussian")).save_pretrained(tmp_path)
    del OPERATORS["gaussian"]
    message = "saved with the operator helpers.gaussian_operator.GaussianOperator: import its module first"
    for load in (AutoConfig, AutoModelForCausalLM, TnnForCausalLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "first, name", [("import helpers.gaussian_operator, ", "the module is imported"), ("import ", "it is not")]
)
def test_another_process(first, name, tmp_path):
    model = seeded(TnnForCausalLM, tiny_config("gaussian"))
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 13)[None]
    code = f"""{first}modeling_tnn, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(model(torch.arange(3, 13)[None]).logits.sum().item())"""
    done = processes.run([sys.executable, "-c", code])
    if "gaussian" in first:
        assert float(done.stdout) == pytest.approx(model(ids).logits.sum().item(), rel=1e-5)
    else:
        assert done.returncode and "helpers.gaussian_operator.GaussianOperator: import its module first" in done.stderr


def test_a_saved_folder_says_what_it_needs(tmp_path):
    seeded(TnnForCausalLM, tiny_config("gaussian")).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["tno_class"] == "helpers.gaussian_operator.GaussianOperator"
    tiny_config().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tno_class"] is None


def test_to_recurrent():
    model = seeded(TnnForCausalLM, tiny_config("gaussian")).double()
    converted, reports = model.to_recurrent(order=16)
    assert (converted.config.tno_type, converted.config.tno_class) == ("modal", None)
    assert converted.config.converted_from == "gaussian" and max(one.l2_layer for one in reports) < 1e-2


def test_direction(monkeypatch):
    monkeypatch.setattr(GaussianOperator, "supports_bidirectional", False)
    with pytest.raises(ValueError, match="`causal` must be True with tno_type='gaussian', got False"):
        TnnConfig(tno_type="gaussian", causal=False)


def test_registration(unregistered):
    register_operator("gaussian", GaussianOperator)
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
