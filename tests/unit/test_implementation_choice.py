"""Which product computes: by name, by the rule of `auto`, and by what can run."""

import pytest
import torch
from transformers.dynamic_module_utils import get_imports

from helpers.models import seeded, tiny_config
from modeling_tnn import TnnForCausalLM, numerics
from modeling_tnn.extensions import Extensions
from modeling_tnn.kernels import choice, fallback
from modeling_tnn.kernels.choice import MISSING, choose
from modeling_tnn.toeplitz import causal_toeplitz_matmul


@pytest.fixture(autouse=True)
def every_warning():
    choice.logger.warning_once.cache_clear()


@pytest.fixture
def recent_gpu(monkeypatch):
    """The CPU as an accelerator whose Triton takes up to 4,096 taps in float32 and half precision."""

    def refused(v, taps, dtype):
        return "refuses" if dtype is torch.float64 or taps > 4096 else None

    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    monkeypatch.setattr(choice, "is_recent_gpu", lambda device: True)
    monkeypatch.setattr(choice, "refused_by_triton", refused)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(choice, "is_triton_available", lambda: False)


def of(dtype=torch.float32) -> torch.Tensor:
    return torch.ones(2, 5, 3, dtype=dtype)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Toeplitz" in record.getMessage()]


def test_on_the_cpu(without_triton, caplog):
    """`auto` is the fused product, bit for bit and in silence."""
    chosen = {"auto": "fused", "fused": "fused", "eager": "eager", "triton": "fused"}
    assert {name: choose(name, of(), 3, torch.float32) for name in chosen} == chosen
    caplog.clear()
    ids, found = torch.arange(34).view(2, 17), []
    for implementation in ("auto", "fused"):
        model = seeded(TnnForCausalLM, tiny_config(tno_implementation=implementation))
        assert f"product={implementation}" in repr(model) and model.config.tno_implementation == implementation
        logits = model(ids).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not said(caplog)


RULE = {
    torch.float32: [(512, "triton"), (513, "fused")],
    torch.bfloat16: [(4096, "triton")],
    torch.float16: [(4096, "triton"), (4097, "fused")],
    torch.float64: [(8, "fused")],
}


def test_auto_is_a_rule(recent_gpu, caplog):
    """What it does not take, it leaves to the fused product in silence; a name overrules it."""
    for dtype, cases in RULE.items():
        for taps, chosen in cases:
            assert choose("auto", of(dtype), taps, torch.promote_types(dtype, torch.float32)) == chosen
    assert [choose(name, of(), 999, torch.float32) for name in ("fused", "triton")] == ["fused", "triton"]
    assert choose("auto", of().to("meta"), 999, torch.float32) == "fused"
    assert not said(caplog)


def test_recorded_graphs_are_eager(recent_gpu):
    """So are functions under torch.func."""
    for implementation in ("auto", "fused", "triton"):
        chosen = []

        def function(v, implementation=implementation, chosen=chosen):
            chosen.append(choose(implementation, v, 3, torch.float32))
            return v.sum()

        torch.func.grad(function)(of())
        torch.jit.trace(lambda v, function=function: function(v).clone(), of(), check_trace=False)
        assert chosen == ["eager", "eager"]


@pytest.mark.parametrize(("implementation", "recent"), [("triton", False), ("triton", True), ("auto", True)])
def test_a_missing_package_is_said_once(implementation, recent, without_triton, monkeypatch, caplog):
    """Of `auto` on a GPU that could use it."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    monkeypatch.setattr(choice, "is_recent_gpu", lambda device: recent)
    model = seeded(TnnForCausalLM, tiny_config(tno_implementation=implementation))
    model(torch.arange(20).view(2, 10))
    assert said(caplog) == [f"Toeplitz products are computed by 'fused' instead of 'triton', which {MISSING}."]


def test_kernels_that_fail_are_left_after_one_warning(monkeypatch, caplog):
    """Not where the memory ends, and not in Triton's interpreter, which tests use."""
    monkeypatch.setattr(fallback, "FAILED", {})
    calls = []

    def compute(error: Exception):
        calls.append(error)
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        fallback.attempt("These", lambda: compute(torch.OutOfMemoryError("CUDA out of memory")), lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TypeError):
        fallback.attempt("These", lambda: compute(TypeError()), lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for _ in range(3):
        assert fallback.attempt("These", lambda: compute(RuntimeError("no C compiler")), lambda: 5) == 5
    assert len(calls) == 3 and fallback.FAILED == {"These": "RuntimeError: no C compiler"}
    assert [record.getMessage() for record in caplog.records] == [
        "These do not run here, and others compute instead of them: RuntimeError: no C compiler"
    ]


def test_a_saved_folder_needs_no_package_of_gpus(tmp_path, caplog):
    """transformers refuses to load a file that needs a package which is not there.

    Without the package the fused product computes, and one who asks for another one is told.
    """
    TnnForCausalLM(tiny_config()).save_pretrained(tmp_path)
    files = {file.name: get_imports(file) for file in tmp_path.glob("*.py")}
    assert "triton" not in {name for imports in files.values() for name in imports}
    caplog.clear()
    alone, v = Extensions(), torch.ones(1, 5, 2)
    assert alone.find_product("triton", v, v[0]) is alone.find_product("auto", v, v[0]) is None
    (said,) = caplog.messages
    assert said.startswith("tno_implementation='triton' needs the package"), said
    names = "auto, fused, eager, triton"
    with pytest.raises(ValueError, match=f"`implementation` must be one of {names}, got 'flash'"):
        causal_toeplitz_matmul(torch.ones(1, 2, 3), torch.ones(3, 2), "flash")
    with pytest.raises(ValueError, match="one of 'auto', 'fused', 'eager', 'triton', got 'flash'"):
        tiny_config(tno_implementation="flash")
