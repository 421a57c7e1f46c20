"""transformers' exporters: encoders, steps in onnxruntime and ExecuTorch; torch.export with products as operators."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.export import Dim

from helpers import processes
from helpers.ecosystem import Matrix, first_output
from helpers.hybrids import HYBRIDS
from helpers.models import BIDIRECTIONAL, VARIANTS, relative_error, seeded, slow, tiny_config
from modeling_tnn import DecodingStep, TnnForCausalLM, TnnForMaskedLM, TnnModel, keep_products
from modeling_tnn.compile.browser import save_for_browser
from modeling_tnn.compile.product import keeps_products

heads = Matrix()
BATCH = torch.export.Dim("batch", min=1, max=64)
LENGTH = torch.export.Dim("length", min=2, max=256)
RECURRENT = ["rtf", "s4d", "modal"]
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}  # OpenVINO takes bfloat16 where a CPU has it


SIZES = dict.fromkeys(("input_ids", "attention_mask"), {0: BATCH, 1: LENGTH})


def recurrent_model(tno_type: str, **fields) -> TnnForCausalLM:
    return seeded(TnnForCausalLM, tiny_config(tno_type, **fields))


def exported(runtime: str, model, inputs: dict, sizes=None):
    """`model` in onnxruntime, or in ExecuTorch for inputs of these sizes, by transformers' exporters."""
    exporters = pytest.importorskip("transformers.exporters")
    if not hasattr(exporters, "ExportedModel"):
        pytest.skip("this release of transformers exports programs that it cannot run")
    for name in {"onnx": ("onnxruntime", "onnxscript"), "executorch": ("executorch",)}[runtime]:
        pytest.importorskip(name)
    if runtime == "onnx":
        return exporters.OnnxExporter().export(model, inputs, exporters.OnnxConfig(dynamic_shapes=sizes))
    return exporters.ExecutorchExporter().export(model, inputs, exporters.ExecutorchConfig())


def padded_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids, mask = torch.arange(rows * length).view(rows, length) % 90 + 3, torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check_encoder(run, model, *shapes: tuple[int, int]):
    for shape in shapes:
        inputs = padded_batch(*shape)
        real = inputs["attention_mask"].bool()
        found, expected = run(**inputs)[0], first_output(model, inputs)
        assert relative_error(found[real], expected[real]) < 1e-4, shape


@pytest.mark.slow
@heads(TnnModel, TnnForMaskedLM)
def test_onnx_encoder(head, tmp_path):
    """One file for all batches and lengths, saved and loaded. Padding changes nothing."""
    model = seeded(head, tiny_config(causal=False, num_hidden_layers=1))
    program = exported("onnx", model, padded_batch(3, 11), SIZES)
    model.save_pretrained(tmp_path)
    program.save_pretrained(tmp_path / "onnx")
    check_encoder(type(program).from_pretrained(tmp_path / "onnx"), model, (1, 2), (2, 17), (4, 130))


@pytest.mark.slow
@pytest.mark.parametrize("tno_type", BIDIRECTIONAL)
def test_onnx_encoder_of_every_operator(tno_type):
    model = seeded(TnnForMaskedLM, tiny_config(tno_type, False))
    check_encoder(exported("onnx", model, padded_batch(3, 11), SIZES), model, (1, 2), (2, 17), (4, 130))


def test_no_complex_number_is_repeated():
    """Filters of `rtf` share denominators. Exporters to ONNX cannot repeat a complex tensor."""
    model = seeded(TnnForMaskedLM, tiny_config("rtf", False))
    graph = torch.export.export(model, (), padded_batch(3, 11), strict=False).graph
    repeated = [node for node in graph.nodes if "repeat_interleave" in str(node.target)]
    assert repeated and not any(node.meta["val"].is_complex() for node in repeated)


@pytest.mark.slow
@heads(TnnForMaskedLM)
def test_executorch_encoder(head):
    model = seeded(head, tiny_config(causal=False))
    check_encoder(exported("executorch", model, padded_batch(3, 11)), model, (3, 11))


def check_step(run, model, empty, length: int):
    """`run` reads a text token by token, and gives the logits of one pass over the whole text."""
    rows = len(empty[0][0])
    ids, states, logits = padded_batch(rows, length)["input_ids"], empty, []
    for token in ids.split(1, dim=1):
        newest, states = run(input_ids=token, states=states)
        logits.append(newest.clone())
        states = [[state.clone() for state in layer] for layer in states]
    expected = first_output(model, {"input_ids": ids})
    assert relative_error(torch.stack(logits, dim=1), expected) < 1e-5


@pytest.mark.parametrize("tno_type", ["rtf", "modal", *slow("s4d")])
def test_decoding_step(tno_type):
    """The same logits as the parallel pass, beyond window and order, for several texts, and in the model's dtype.

    By torch.export it is one graph, for all batch sizes.
    """
    for dtype in (torch.float64, torch.float32):
        model = recurrent_model(tno_type).to(dtype)
        step = DecodingStep(model)
        with torch.no_grad():
            check_step(step, model, step.empty(3), 70)
        _, states = step(torch.zeros(3, 1, dtype=torch.long), step.empty(3))
        for layer, empty in zip(states, step.empty(3), strict=True):
            assert [state.shape for state in layer] == [state.shape for state in empty]
    inputs, sizes = step_arguments(step.empty(2))
    program = torch.export.export(step, (), inputs, dynamic_shapes=sizes).module()
    with torch.no_grad():
        check_step(program, model, step.empty(5), 9)


@pytest.mark.parametrize("tno_type", slow(*RECURRENT))
def test_several_tokens_are_one_step(tno_type):
    model = recurrent_model(tno_type)
    step, ids = DecodingStep(model), padded_batch(3, 40)["input_ids"]
    with torch.no_grad():
        _, states = step(ids[:, :23], step.empty(3))
        assert relative_error(step(ids[:, 23:], states)[0], model(ids).logits[:, -1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("tno_type", RECURRENT)
def test_program_for_browsers(tno_type, tmp_path):
    """It writes the tokens of `generate` in both runtimes, from zeros of its shapes, as in transformers.js."""
    runtime, openvino = map(pytest.importorskip, ("onnxruntime", "openvino"))
    pytest.importorskip("onnxscript")
    model, prompt = recurrent_model(tno_type, eos_token_id=None), padded_batch(1, 23)["input_ids"]
    save_for_browser(model, SimpleNamespace(save_pretrained=lambda folder: None), tmp_path)
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, 23:].tolist()
    file = tmp_path / "model" / "onnx" / "model.onnx"
    session, compiled = runtime.InferenceSession(file), openvino.compile_model(file, "CPU", EXACT)
    given = session.get_inputs()[1:]
    assert [one.name for one in session.get_outputs()][:3] == ["logits", "present.0.key", "present_conv.0"]
    types = {"tensor(float)": "float32", "tensor(double)": "float64"}
    shapes = [[size if isinstance(size, int) else 0 for size in one.shape] for one in given]
    for run in (lambda inputs: session.run(None, inputs), lambda inputs: list(compiled(inputs).values())):
        states = [np.zeros(shape, types[one.type]) for shape, one in zip(shapes, given, strict=True)]
        ids, found = prompt.numpy(), []
        while len(found) < len(expected):
            named = {one.name: state for one, state in zip(given, states, strict=True)}
            logits, *states = run({"input_ids": ids} | named)
            ids = logits[:, -1].argmax(-1, keepdims=True)
            found.append(ids.item())
        assert found == expected and states[0].shape == (1, 1, 23 + 29, 1)


@pytest.mark.slow
@pytest.mark.parametrize("head, causal", [(TnnForCausalLM, True), (TnnForMaskedLM, False), (TnnModel, False)])
def test_openvino(head, causal, tmp_path):
    """A pass in OpenVINO, which reads the program that `torch.onnx.export` writes."""
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    model = seeded(head, tiny_config(causal=causal, num_hidden_layers=1, use_cache=False))
    sizes = dict.fromkeys(SIZES, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    given = {"kwargs": padded_batch(3, 11), "dynamic_shapes": sizes, "dynamo": True, "verbose": False}
    torch.onnx.export(model, (), tmp_path / "model.onnx", **given)
    compiled = openvino.compile_model(tmp_path / "model.onnx", "CPU", EXACT)
    run = lambda **inputs: [torch.from_numpy(compiled({k: x.numpy() for k, x in inputs.items()})[0])]  # noqa: E731
    check_encoder(run, model, (1, 2), (2, 17), (4, 130))


def step_arguments(empty) -> tuple[dict, dict]:
    """Inputs of a step as an example, and its free dimensions."""
    inputs = {"input_ids": torch.zeros(len(empty[0][0]), 1, dtype=torch.long), "states": empty}
    return inputs, {"input_ids": {0: BATCH}, "states": [[{0: BATCH} for _ in layer] for layer in empty]}


def single(states):
    """The states in float32, to which transformers' exporters turn all inputs."""
    return [[state.float() for state in layer] for layer in states]


@pytest.mark.slow
@heads(TnnForCausalLM)
@pytest.mark.parametrize("tno_type", RECURRENT)
def test_onnx_decoding_step(head, tno_type):
    """States go in and come out, in any number of rows."""
    model = recurrent_model(tno_type)
    step = DecodingStep(model)
    program = exported("onnx", step, *step_arguments(single(step.empty(2))))
    check_step(program, model, single(step.empty(3)), 40)


@pytest.mark.slow
@heads(TnnForCausalLM)
@pytest.mark.parametrize("tno_type", RECURRENT)
def test_executorch_decoding_step(head, tno_type):
    model = recurrent_model(tno_type)
    step = DecodingStep(model)
    inputs, _ = step_arguments(single(step.empty(3)))
    check_step(exported("executorch", step, inputs), model, inputs["states"], 40)


WITHOUT = [
    ("rpe", {}, "`tno_type` must be one of rtf, s4d, modal for one step, got 'rpe'"),
    ("rtf", HYBRIDS["full"], "`layer_types` must be 'toeplitz' in all layers"),
    ("rtf", {"position_embedding": "sinusoidal"}, "`position_embedding` must be None"),
]


def test_models_without_a_decoding_step():
    for tno_type, fields, message in WITHOUT:
        with pytest.raises(ValueError, match=message):
            DecodingStep(recurrent_model(tno_type, **fields))


def test_matrix_of_the_page():
    heads.check()


FEW = [("rpe", True, False)]
ALL = [(*variant, strict) for variant in VARIANTS for strict in (False, True)]


def language_model(tno_type="rpe", causal=True, **fields):
    config = tiny_config(tno_type, causal, use_cache=False, num_hidden_layers=1, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def inputs_of(rows: int, length: int, packed: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % 99
    return {"input_ids": ids} | ({"position_ids": torch.arange(length).expand(rows, length) % 7} if packed else {})


def exported_products(model, strict: bool = False, packed: bool = False):
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


@pytest.mark.parametrize(("tno_type", "causal", "strict"), [*FEW, *slow(*(case for case in ALL if case not in FEW))])
def test_one_node_for_each_product(tno_type, causal, strict):
    """SKI has two products in a layer. One program for all batches and lengths, and one of packed rows."""
    model = language_model(tno_type, causal)
    with keep_products():
        program = exported_products(model, strict)
        packs = not strict and tno_type != "ski"  # SKI refuses packed rows in a graph
        packed = exported_products(model, packed=True).module() if packs else None
    assert products(program) == (2 if tno_type == "ski" else 1)
    check(program.module(), model, (1, 2, 17, 63, 64, 65, 256))
    if packed:
        check(packed, model, (2, 17, 64, 200), packed=True)


@pytest.mark.slow
def test_it_must_be_asked_for():
    """By the caller, and for torch.export alone. "eager" always means PyTorch's own operations."""
    model = language_model()
    assert products(exported_products(model)) == 0
    with keep_products():
        assert not keeps_products()  # nothing is recorded here
        assert products(exported_products(language_model(tno_implementation="eager"))) == 0
        inputs = inputs_of(2, 17)["input_ids"]
        with torch.no_grad():
            traced = torch.jit.trace(model.requires_grad_(False), inputs, strict=False, check_trace=False)
    assert "modeling_tnn::" not in str(traced.inlined_graph)
    with pytest.raises(RuntimeError), keep_products():
        raise RuntimeError
    assert products(exported_products(model)) == 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_gradients_and_files(tmp_path):
    """Its gradients are those of the model; loaded in a fresh process, which imports the package and no model."""
    model = language_model()
    with keep_products():
        program = exported_products(model)
    logits, found = [], []
    for module in (program.module(), model):
        embeddings = dict(module.named_parameters())["model.embed_tokens.weight"]
        logits.append(module(**inputs_of(2, 40)).logits)
        found.append(torch.autograd.grad(logits[-1].square().mean(), embeddings)[0])
    assert relative_error(*found) < 1e-5
    torch.export.save(program, tmp_path / "program.pt2")
    processes.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path)
    assert relative_error(load_file(tmp_path / "found.safetensors")["logits"], logits[1].detach()) < 1e-5
