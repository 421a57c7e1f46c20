"""Which product computes: by name, by what was measured on a device, and by what can run."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_imports

from helpers.models import random, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, numerics, toeplitz, toeplitz_choice
from modeling_tnn.toeplitz import causal_toeplitz_matmul
from modeling_tnn.toeplitz_choice import choose, describe
from modeling_tnn.toeplitz_measured import MEASURED, Row


@pytest.fixture(autouse=True)
def every_warning():
    toeplitz_choice.logger.warning_once.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """An accelerator on which two implementations were measured, and both can run."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    rows = (Row("float32", 8, "triton"), Row("float32", 64, "cudnn"), Row("bfloat16", 16, "cudnn"))
    monkeypatch.setitem(MEASURED, "cpu", rows)
    monkeypatch.setattr(toeplitz_choice, "REFUSALS", {name: lambda *_: None for name in ("triton", "cudnn")})


def of(dtype=torch.float32) -> torch.Tensor:
    return torch.ones(2, 5, 3, dtype=dtype)


def test_no_gpu_was_measured():
    """Whoever adds a row has measured it there: README and docs say so then."""
    assert MEASURED == {}


@pytest.mark.parametrize(
    ("implementation", "chosen"),
    [("auto", "fused"), ("fused", "fused"), ("eager", "eager"), ("cudnn", "fused"), ("triton", "fused")],
)
def test_on_the_cpu(implementation, chosen, monkeypatch):
    monkeypatch.setattr(toeplitz_choice, "find_spec", lambda name: None)
    assert choose(implementation, of(), 3, torch.float32) == chosen


@pytest.mark.parametrize(
    ("dtype", "taps", "chosen"),
    [
        (torch.float32, 1, "triton"), (torch.float32, 8, "triton"), (torch.float32, 9, "cudnn"),
        (torch.float32, 65, "fused"), (torch.bfloat16, 8, "cudnn"), (torch.float64, 8, "fused"),
    ],
)  # fmt: skip
def test_auto_takes_what_was_measured(measured, dtype, taps, chosen):
    assert choose("auto", of(dtype), taps, torch.float32) == chosen


def test_auto_on_an_accelerator_without_measurements(monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    assert choose("auto", of(), 3, torch.float32) == "fused"
    assert choose("auto", of().to("meta"), 3, torch.float32) == "fused"


def test_a_name_overrules_the_measurement(measured):
    assert [choose(name, of(), 99, torch.float32) for name in ("fused", "cudnn", "triton")] == [
        "fused", "cudnn", "triton",
    ]  # fmt: skip


@pytest.mark.parametrize("implementation", ["auto", "fused", "cudnn", "triton"])
def test_recorded_graphs_are_eager(measured, implementation):
    """So are functions under torch.func."""
    chosen = []

    def function(v):
        chosen.append(choose(implementation, v, 3, torch.float32))
        return v.sum()

    torch.func.grad(function)(of())
    torch.jit.trace(lambda v: function(v).clone(), of(), check_trace=False)
    assert chosen == ["eager", "eager"]


def test_what_cannot_run_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(toeplitz_choice, "find_spec", lambda name: None)
    with caplog.at_level("WARNING"):
        model = seeded(TnnForCausalLM, tiny_config(tno_implementation="triton"))
        model(torch.arange(20).view(2, 10))
    said = [record.getMessage() for record in caplog.records if "Toeplitz" in record.getMessage()]
    assert said == [
        "Toeplitz products are computed by 'fused' instead of 'triton', which needs the package triton, which is not "
        "installed."
    ]


def test_nothing_is_said_of_auto(caplog):
    with caplog.at_level("WARNING"):
        seeded(TnnForCausalLM, tiny_config())(torch.arange(20).view(2, 10))
    assert not [record for record in caplog.records if "Toeplitz" in record.getMessage()]


def test_the_chosen_product_computes(measured, monkeypatch):
    """Kernels are cut to the sequence before the number of taps counts."""
    called = []
    for name in ("triton", "cudnn"):
        monkeypatch.setitem(toeplitz.KERNELS, name, lambda v, *_, name=name: called.append(name) or v)
    for length, taps in ((20, 8), (8, 200), (20, 9)):
        causal_toeplitz_matmul(random(2, length, 3).float(), random(3, taps).float(), "auto")
    causal_toeplitz_matmul(torch.ones(0, 5, 3), torch.ones(3, 2), "auto")  # no sequence: nothing to compute
    assert called == ["triton", "triton", "cudnn"]


def test_auto_on_the_cpu_is_fused_bit_for_bit():
    ids, found = torch.arange(34).view(2, 17), []
    for implementation in ("auto", "fused"):
        model = seeded(TnnForCausalLM, tiny_config(tno_implementation=implementation))
        logits = model(ids).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("implementation", ["auto", "fused", "triton"])
def test_repr(implementation):
    model = TnnForCausalLM(tiny_config(tno_implementation=implementation))
    shown = "auto (fused on cpu)" if implementation == "auto" else implementation
    assert f"product={shown}" in repr(model)
    assert model.config.tno_implementation == implementation


def test_description_of_a_measured_device(measured):
    shown = "triton to 8 taps in float32, cudnn to 64 taps in float32, cudnn to 16 taps in bfloat16, else fused on cpu"
    assert describe("auto", torch.device("cpu")) == f"auto ({shown})"


def test_auto_is_not_saved(tmp_path):
    """Which product is the fastest is a matter of the machine, and earlier versions know no `"auto"`."""
    for implementation in ("auto", "fused", "eager", "triton", "cudnn"):
        config = tiny_config(tno_implementation=implementation)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved.get("tno_implementation", "auto") == implementation
        assert ("tno_implementation" in saved) == (implementation != "auto")
        assert AutoConfig.from_pretrained(tmp_path).tno_implementation == implementation
        assert config.to_dict()["tno_implementation"] == implementation


def test_a_saved_folder_needs_no_package_of_gpus(tmp_path):
    """It carries their code; transformers refuses to load a file that needs a package which is not there."""
    TnnForCausalLM(tiny_config()).save_pretrained(tmp_path)
    files = {file.name: get_imports(file) for file in tmp_path.glob("*.py")}
    assert {"toeplitz_triton.py", "toeplitz_cudnn.py", "toeplitz_measured.py"} <= files.keys()
    assert not {"triton", "cudnn"} & {name for imports in files.values() for name in imports}


def test_unknown_names():
    names = "auto, fused, eager, cudnn, triton"
    with pytest.raises(ValueError, match=f"`implementation` must be one of {names}, got 'flash'"):
        causal_toeplitz_matmul(torch.ones(1, 2, 3), torch.ones(3, 2), "flash")
    with pytest.raises(ValueError, match="one of 'auto', 'fused', 'eager', 'cudnn', 'triton', got 'flash'"):
        tiny_config(tno_implementation="flash")
