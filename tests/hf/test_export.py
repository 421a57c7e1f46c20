"""torch.export and torch.onnx.export: one program for all batch sizes and lengths, compared with eager mode.

Lengths are 1, 2, an odd one, those around `max_position_embeddings` P, where kernels end or go on, and four times P.
"""

import pytest
import torch
from packaging.version import Version
from torch.export import Dim

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import VALUES, VARIANTS, relative_error, seeded, slow, tiny_config, values_with_gaps
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, TnnModel
from modeling_tnn.tno_rtf import extend_kernel, kernel_of_any_length, rational_kernel
from modeling_tnn.tools.sequence_pairs import TnnForSequencePairClassification

P = 64
LENGTHS = (1, 2, 17, P - 1, P, P + 1, 4 * P)
KINDS = {
    "auto": {0: Dim.AUTO, 1: Dim.AUTO},
    "dynamic": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC},
    "range": {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=4 * P)},
    "range from 1": {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=4 * P)},
}
OPERATORS = [{"tno_type": tno_type, "causal": causal} for tno_type, causal in VARIANTS]
# Another path through the coefficients, the mask or the positions.
SKI = {"tno_type": "ski", "causal": False, "ski_rank": 64}
OPTIONS = [
    {"rpe_window": 20},
    {"learnable_decay": True, "rpe_window": 20},
    {"decay": None, "tno_implementation": "eager"},
    {"rpe_input": "sinusoidal", "position_embedding": "sinusoidal"},
    {"rpe_input": "normalized", "norm_type": "batchnorm"},
    {"tno_type": "fd", "fd_input": "cos", "fd_resolution": 64, "gtu_norm": True},
    {"tno_type": "modal", "modal_window": 40},
    {"tno_type": "rtf", "rtf_constraint": None, "max_position_embeddings": 63},
    {"tno_type": "rtf", "rtf_num_denominators": None, "rtf_state_size": 33},
    SKI | {"ski_rank": 2, "ski_filter_size": 1},
    SKI | {"ski_filter_size": 33},
    SKI | {"ski_interpolation": "released"},
    *(fields | {"causal": causal} for fields in MIXED.values() for causal in (True, False)),
]
NAMES = ["auto", "dynamic", "range from 1"]


def language_model(causal=True, **fields):
    config = tiny_config(causal=causal, **{"use_cache": False, "num_hidden_layers": 1} | fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def batch(rows: int, length: int, mask: bool = False) -> dict[str, torch.Tensor]:
    """Random ids, and a mask with padding on either side."""
    torch.manual_seed(length)
    ids = torch.randint(3, 99, (rows, length))
    if not mask:
        return {"input_ids": ids}
    position, first = torch.arange(length), torch.randint(0, (length + 2) // 3, (rows, 1))
    return {"input_ids": ids, "attention_mask": ((position >= first) & (position < length - first // 2)).long()}


def exported(model, inputs, sizes):
    return torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, sizes), strict=False).module()


@torch.no_grad()
def check_program(run, model, mask: bool = False):
    """`run(inputs)` gives what the model gives."""
    for rows, length in zip((1, 2, 5, 1, 2, 3, 2), LENGTHS, strict=True):
        inputs = batch(rows, length, mask)
        expected, actual = model(**inputs)[0], run(inputs)
        real = inputs["attention_mask"].bool() if mask and expected.dim() == 3 else ...
        assert relative_error(actual[real], expected[real]) < 1e-5, (rows, length)


@pytest.mark.parametrize(
    "fields, kind, mask",
    [(MIXED["hyena"], "range", True)]
    + slow(*((fields, "range", True) for fields in OPERATORS + OPTIONS))
    + slow(*((fields, kind, False) for fields in OPERATORS for kind in NAMES)),
)
def test_one_program_for_all_lengths(fields, kind, mask):
    model = language_model(**fields)
    program = exported(model, batch(3, 11, mask), KINDS[kind])
    check_program(lambda inputs: program(**inputs)[0], model, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name, causal", [("full", True), ("sliding", False), ("attention", True)])
def test_hybrids(name, causal, mask):
    """Exported and traced, with the masks that transformers makes for attention."""
    model = language_model(causal, **HYBRIDS[name] | {"num_hidden_layers": 2})
    program = exported(model, batch(3, 11, mask), KINDS["dynamic"])
    check_program(lambda inputs: program(**inputs)[0], model, mask)
    model.config.return_dict = False
    traced = torch.jit.trace(model, example_kwarg_inputs=batch(3, 11, mask), check_trace=False)
    check_program(lambda inputs: traced(**inputs)[0], model, mask)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("tno_type, causal", [("modal", True), ("ski", False), *slow(*VARIANTS[::2])])
def test_jit_trace(tno_type, causal):
    """Traced with a mask that hides nothing, of a batch shorter than any kernel; then with padding at all lengths."""
    model = seeded(TnnModel, tiny_config(tno_type, causal, use_cache=False, return_dict=False, modal_window=20))
    ids = torch.randint(3, 99, (3, 11))
    program = torch.jit.trace(model, (ids, torch.ones_like(ids)), check_trace=False)
    check_program(lambda inputs: program(*inputs.values())[0], model, mask=True)


@pytest.mark.slow
def test_compiled_rtf_beyond_its_truncation():
    """One more graph, whose size does not depend on the length."""
    torch.compiler.reset()
    model = language_model(tno_type="rtf")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (P + 1, 130, 4 * P):
        inputs = batch(2, length)
        assert relative_error(compiled(**inputs)[0], model(**inputs)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="torch 2.11 cannot prove min(L, 2 L) = L")
def test_pairs():
    model = seeded(TnnForSequencePairClassification, tiny_config("fd", False))
    sizes = {0: Dim("pairs", min=1, max=64), 2: Dim("length", min=2, max=4 * P)}
    program = exported(model, {"input_ids": torch.randint(3, 99, (3, 2, 11))}, sizes)
    for pairs, length in ((1, 2), (5, 17), (2, P + 1), (1, 4 * P)):
        inputs = {"input_ids": torch.randint(3, 99, (pairs, 2, length))}
        assert relative_error(program(**inputs)[0], model(**inputs)[0]) < 1e-5


@pytest.mark.slow
def test_images():
    """An exported image model takes any number of images of one size."""
    fields = {"spatial_dims": 2, "image_size": 24, "patch_size": 4, "max_position_embeddings": 36, "rtf_state_size": 4}
    model = seeded(TnnForImageClassification, tiny_config("rtf", False, **fields))
    program = exported(model, {"pixel_values": torch.rand(3, 3, 24, 24)}, {0: Dim("batch", min=1, max=64)})
    for rows in (1, 2, 7):
        images = torch.rand(rows, 3, 24, 24)
        assert relative_error(program(pixel_values=images)[0], model(images)[0]) < 1e-5


@pytest.mark.parametrize("fields", slow(*OPERATORS))
def test_onnx(fields, tmp_path):
    """In onnxruntime."""
    model, inputs = language_model(**fields), batch(3, 11, mask=True)
    program = onnx_program(model, inputs, tmp_path)
    check_program(lambda inputs: program(**inputs)[0], model, mask=True)


def onnx_program(model, inputs, folder):
    """The model in onnxruntime, as a function of its inputs."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    sizes = dict.fromkeys(inputs, KINDS["dynamic"])
    program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
    program.save(folder / "model.onnx")
    session = runtime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return lambda **given: [torch.from_numpy(session.run(None, {name: x.numpy() for name, x in given.items()})[0])]


def value_batch(name: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    """The inputs of a model of `VALUES`, with padding on the left."""
    _, fields, key = VALUES[name]
    mask = torch.arange(length) >= torch.arange(rows)[:, None] % min(3, length)
    return {key: values_with_gaps(rows, length, fields["input_channels"]), "attention_mask": mask.long()}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("causal, onnx", slow((True, False), (False, False), (True, True)))
def test_real_values(name, causal, onnx, tmp_path):
    """One program for all lengths, in which values may be missing, for PyTorch or onnxruntime."""
    head, fields, _ = VALUES[name]
    model = seeded(head, tiny_config("s4d", causal, use_cache=False, num_hidden_layers=1, **fields))
    inputs = value_batch(name, 3, 11)
    run = onnx_program(model, inputs, tmp_path) if onnx else exported(model, inputs, KINDS["range"])
    for rows, length in ((2, 2), (1, 17), (2, 4 * P)):
        given = value_batch(name, rows, length)
        real = given["attention_mask"].bool() if name == "positions" else ...
        assert relative_error(run(**given)[0][real], model(**given)[0][real]) < 1e-5, (rows, length)


@pytest.mark.parametrize("radius", [0.5, 0.999, 1.02])
def test_rational_kernel_of_any_length(radius):
    """Beyond its truncation the kernel continues by the recursion, also with poles on and outside the unit circle."""
    angle = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    a = torch.stack([-2 * radius * angle.cos(), torch.full_like(angle, radius**2)], dim=1)  # (3, 2)
    taps = rational_kernel(a, torch.ones(6, 2, dtype=torch.float64), 16)
    for length in (1, 2, 16, 17, 64, 200):
        expected = taps[:, :length] if length <= 16 else extend_kernel(a, taps, length)
        assert relative_error(kernel_of_any_length(a, taps, length), expected) < 1e-7
