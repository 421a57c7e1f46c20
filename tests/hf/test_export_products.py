"""torch.export with each Toeplitz product as one operator, for who asks for it; plain operations otherwise."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.export import Dim

from helpers import processes
from helpers.models import VARIANTS, exhaustive, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, keep_products
from modeling_tnn.compile.product import keeps_products

FEW = [("rpe", True, False), ("rtf", True, True), ("ski", False, False)]
ALL = [(*variant, strict) for variant in VARIANTS for strict in (False, True)]


def language_model(tno_type="rpe", causal=True, **fields):
    config = tiny_config(tno_type, causal, use_cache=False, num_hidden_layers=1, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def inputs_of(rows: int, length: int, packed: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 99
    return {"input_ids": ids} | ({"position_ids": torch.arange(length).expand(rows, length) % 7} if packed else {})


def exported(model, strict: bool = False, packed: bool = False):
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=256)}
    sizes = {0: Dim.AUTO, 1: Dim.AUTO} if packed else sizes
    inputs = inputs_of(3, 11, packed)
    return torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, sizes), strict=strict)


def products(program) -> int:
    return sum("modeling_tnn.convolution" in str(node.target) for node in program.graph.nodes)


@torch.no_grad()
def check(run, model, lengths, packed: bool = False):
    for rows, length in zip((1, 2, 5, 1, 2, 3, 2), lengths, strict=False):
        inputs = inputs_of(rows, length, packed)
        assert relative_error(run(**inputs).logits, model(**inputs).logits) < 1e-5, (rows, length)


@pytest.mark.parametrize(
    ("tno_type", "causal", "strict"), [*FEW, *exhaustive(*(case for case in ALL if case not in FEW))]
)
def test_one_node_for_each_product(tno_type, causal, strict):
    """SKI has two products in a layer. One program for all batches and lengths, and one of packed rows."""
    model = language_model(tno_type, causal)
    with keep_products():
        program = exported(model, strict)
        packed = None if strict else exported(model, packed=True).module()
    assert products(program) == (2 if tno_type == "ski" else 1)
    check(program.module(), model, (1, 2, 17, 63, 64, 65, 256))
    if packed:
        check(packed, model, (2, 17, 64, 200), packed=True)


def test_it_must_be_asked_for():
    """By the caller, and for torch.export alone. "eager" always means PyTorch's own operations."""
    model = language_model()
    assert products(exported(model)) == 0
    with keep_products():
        assert not keeps_products()  # nothing is recorded here
        assert products(exported(language_model(tno_implementation="eager"))) == 0
        inputs = inputs_of(2, 17)["input_ids"]
        with torch.no_grad():
            traced = torch.jit.trace(model.requires_grad_(False), inputs, strict=False, check_trace=False)
    assert "modeling_tnn::" not in str(traced.inlined_graph)
    with pytest.raises(RuntimeError), keep_products():
        raise RuntimeError
    assert products(exported(model)) == 0


def test_onnx_has_plain_operations():
    pytest.importorskip("onnxscript")
    with keep_products():
        program = torch.onnx.export(language_model(), kwargs=inputs_of(2, 17), dynamo=True, verbose=False)
    assert all("convolution" not in node.op_type and "modeling_tnn" not in node.domain for node in program.model.graph)


LOAD = """
import sys, torch, modeling_tnn
from safetensors.torch import save_file
run = torch.export.load("program.pt2").module()
with torch.no_grad():
    save_file({"logits": run(input_ids=torch.arange(80).view(2, 40) % 99).logits.contiguous()}, "found.safetensors")
"""


def test_gradients_and_files(tmp_path):
    """Its gradients are those of the model; loaded in a fresh process, which imports the package and no model."""
    model = language_model()
    with keep_products():
        program = exported(model)
    logits, found = [], []
    for module in (program.module(), model):
        embeddings = dict(module.named_parameters())["model.embed_tokens.weight"]
        logits.append(module(**inputs_of(2, 40)).logits)
        found.append(torch.autograd.grad(logits[-1].square().mean(), embeddings)[0])
    assert relative_error(*found) < 1e-5
    torch.export.save(program, tmp_path / "program.pt2")
    processes.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path)
    assert relative_error(load_file(tmp_path / "found.safetensors")["logits"], logits[1].detach()) < 1e-5
