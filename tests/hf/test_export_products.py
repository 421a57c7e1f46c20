"""torch.export with each Toeplitz product as one operator, for who asks for it; plain operations otherwise."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.export import Dim

from helpers import processes
from helpers.models import VARIANTS, exhaustive, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, keep_products
from modeling_tnn.compile.product import keeps_products

LENGTHS = (1, 2, 17, 63, 64, 65, 256)
FEW = [("rpe", True, False), ("rtf", True, True), ("ski", False, False)]
ALL = [(*variant, strict) for variant in VARIANTS for strict in (False, True)]
CASES = [*FEW, *exhaustive(*(case for case in ALL if case not in FEW))]


def language_model(tno_type="rpe", causal=True, **fields):
    config = tiny_config(tno_type, causal, use_cache=False, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) % 99


def exported(model, strict: bool = False):
    sizes = {"input_ids": {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=256)}}
    return torch.export.export(model, (), {"input_ids": ids_of(3, 11)}, dynamic_shapes=sizes, strict=strict)


def products(program) -> int:
    return sum("modeling_tnn.convolution" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(("tno_type", "causal", "strict"), CASES)
def test_one_node_for_each_product(tno_type, causal, strict):
    """Two layers; SKI has two products in each. One program for all batches and lengths."""
    model = language_model(tno_type, causal)
    with keep_products():
        program = exported(model, strict)
    assert products(program) == (4 if tno_type == "ski" else 2)
    run = program.module()
    for rows, length in zip((1, 2, 5, 1, 2, 3, 2), LENGTHS, strict=True):
        ids = ids_of(rows, length)
        with torch.no_grad():
            assert relative_error(run(input_ids=ids).logits, model(ids).logits) < 1e-5, (rows, length)


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("ski", False)])
def test_packed_rows(tno_type, causal):
    model = language_model(tno_type, causal)
    inputs = {"input_ids": ids_of(3, 11), "position_ids": ids_of(3, 11) % 5}
    sizes = dict.fromkeys(inputs, {0: Dim.AUTO, 1: Dim.AUTO})
    with keep_products():
        run = torch.export.export(model, (), inputs, dynamic_shapes=sizes, strict=False).module()
    for length in (2, 17, 64, 200):
        inputs = {"input_ids": ids_of(2, length), "position_ids": torch.arange(length).expand(2, length) % 7}
        assert relative_error(run(**inputs).logits, model(**inputs).logits) < 1e-5, length


def test_gradients():
    model = language_model()
    with keep_products():
        run = exported(model).module()
    found = []
    for module in (run, model):
        embeddings = dict(module.named_parameters())["model.embed_tokens.weight"]
        found.append(torch.autograd.grad(module(input_ids=ids_of(2, 40)).logits.square().mean(), embeddings)[0])
    assert relative_error(*found) < 1e-5


def test_it_must_be_asked_for():
    """By the caller, and for torch.export alone. "eager" always means PyTorch's own operations."""
    model = language_model()
    assert products(exported(model)) == 0
    with keep_products():
        assert not keeps_products()  # nothing is recorded here
        assert products(exported(language_model(tno_implementation="eager"))) == 0
        with torch.no_grad():
            traced = torch.jit.trace(model.requires_grad_(False), ids_of(2, 17), strict=False, check_trace=False)
    assert "modeling_tnn::" not in str(traced.inlined_graph)
    with pytest.raises(RuntimeError), keep_products():
        raise RuntimeError
    assert products(exported(model)) == 0


def test_onnx_has_plain_operations():
    pytest.importorskip("onnxscript")
    with keep_products():
        program = torch.onnx.export(language_model(), kwargs={"input_ids": ids_of(2, 17)}, dynamo=True, verbose=False)
    assert all("convolution" not in node.op_type and "modeling_tnn" not in node.domain for node in program.model.graph)


LOAD = """
import sys, torch, modeling_tnn
from safetensors.torch import save_file
run = torch.export.load("program.pt2").module()
with torch.no_grad():
    save_file({"logits": run(input_ids=torch.arange(80).view(2, 40) % 99).logits.contiguous()}, "found.safetensors")
"""


def test_saved_and_loaded(tmp_path):
    """In a fresh process, which imports the package and no model."""
    model = language_model()
    with keep_products():
        torch.export.save(exported(model), tmp_path / "program.pt2")
    processes.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path, env=dict(os.environ))
    with torch.no_grad():
        expected = model(ids_of(2, 40)).logits
    assert relative_error(load_file(tmp_path / "found.safetensors")["logits"], expected) < 1e-5
