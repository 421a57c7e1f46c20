"""torch.export and torch.onnx.export: one program for all batch sizes and lengths, compared with eager mode.

Lengths are 1, 2, an odd one, those around `max_position_embeddings` P, where kernels end or go on, and four times P.
"""

import pytest
import torch
from packaging.version import Version
from torch.export import Dim

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import BIDIRECTIONAL, CAUSAL, exhaustive, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
)
from modeling_tnn.tno_rtf import extend_kernel, kernel_of_any_length, rational_kernel
from modeling_tnn.toeplitz import (
    Pair,
    exported_convolution,
    exported_quotient,
    inverse_matrix_transform,
    matrix_transform,
)
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification

P = 64
LENGTHS = (1, 2, 17, P - 1, P, P + 1, 4 * P)
OPERATORS = [(tno_type, True) for tno_type in CAUSAL]
OPERATORS += [(tno_type, False) for tno_type in BIDIRECTIONAL]
KINDS = {
    "auto": lambda: {0: Dim.AUTO, 1: Dim.AUTO},
    "dynamic": lambda: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC},
    "range": lambda: {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=4 * P)},
    "range from 1": lambda: {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=4 * P)},
}
# Another path through the coefficients, the mask or the positions.
OPTIONS = {
    "window": {"rpe_window": 20},
    "learned decay and window": {"learnable_decay": True, "rpe_window": 20},
    "no decay, plain": {"decay": None, "tno_implementation": "eager"},
    "sinusoidal": {"rpe_input": "sinusoidal", "position_embedding": "sinusoidal"},
    "normalized": {"rpe_input": "normalized", "norm_type": "batchnorm"},
    "cosine grid": {"tno_type": "fd", "fd_input": "cos", "fd_resolution": 64, "gtu_norm": True},
    "window of the modes": {"tno_type": "modal", "modal_window": 40},
    "no constraint, odd truncation": {"tno_type": "rtf", "rtf_constraint": None, "max_position_embeddings": 63},
    "one denominator a channel": {"tno_type": "rtf", "rtf_num_denominators": None, "rtf_state_size": 33},
    "two points": {"tno_type": "ski", "causal": False, "ski_rank": 2, "ski_filter_size": 1},
    "a point at each position": {"tno_type": "ski", "causal": False, "ski_rank": 64, "ski_filter_size": 33},
    "four points": {"tno_type": "ski", "causal": False, "ski_rank": 64, "ski_interpolation": "cubic"},
    "released points": {"tno_type": "ski", "causal": False, "ski_rank": 64, "ski_interpolation": "released"},
}


def language_model(tno_type, causal, **fields):
    config = tiny_config(tno_type, causal, **{"use_cache": False, "num_hidden_layers": 1} | fields)
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
def check_program(run, model, mask: bool = False, lengths=LENGTHS):
    """`run(inputs)` gives what the model gives."""
    for rows, length in zip((1, 2, 5, 1, 2, 3, 2), lengths, strict=True):
        inputs = batch(rows, length, mask)
        expected, actual = model(**inputs)[0], run(inputs)
        real = inputs["attention_mask"].bool() if mask and expected.dim() == 3 else ...
        assert relative_error(actual[real], expected[real]) < 1e-5, (rows, length)


def grid(*default):
    """Operators with kinds of dimensions; those that are not named are for the exhaustive tests."""
    cases = [(*operator, kind) for operator in OPERATORS for kind in KINDS]
    return [case if default_case(case, default) else exhaustive(case)[0] for case in cases]


def default_case(case, default) -> bool:
    return case[2] == "range" and case[0] in ("rpe", "rtf") or case in default


@pytest.mark.parametrize("tno_type, causal, kind", grid(("fd", False, "auto"), ("ski", False, "dynamic")))
def test_one_program_for_all_lengths(tno_type, causal, kind):
    model = language_model(tno_type, causal)
    program = exported(model, batch(3, 11), KINDS[kind]())
    check_program(lambda inputs: program(**inputs)[0], model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_way_of_an_operator(options):
    model = language_model(**{"tno_type": "rpe", "causal": True} | options)
    program = exported(model, batch(3, 11, mask=True), KINDS["range"]())
    check_program(lambda inputs: program(**inputs)[0], model, mask=True)


@pytest.mark.parametrize("name, causal", [("hyena", True), *exhaustive(("hyena", False), ("s4", True), ("s4", False))])
def test_mixers(name, causal):
    model = language_model("rpe", causal, **MIXED[name])
    program = exported(model, batch(3, 11, mask=True), KINDS["range"]())
    check_program(lambda inputs: program(**inputs)[0], model, mask=True)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name, causal", [("full", True), ("sliding", False), ("attention", True)])
def test_hybrids(name, causal, mask):
    """Exported and traced, with the masks that transformers makes for attention."""
    fields = HYBRIDS[name] | {"num_hidden_layers": 2}
    model = language_model("rpe", causal, **fields)
    program = exported(model, batch(3, 11, mask), KINDS["dynamic"]())
    check_program(lambda inputs: program(**inputs)[0], model, mask)
    model.config.return_dict = False
    traced = torch.jit.trace(model, example_kwarg_inputs=batch(3, 11, mask), check_trace=False)
    check_program(lambda inputs: traced(**inputs)[0], model, mask)


ONE_FOR_ONNX = ("ski", False, True)
HEADS = [
    (TnnForCausalLM, "fd", True, True),
    (TnnForMaskedLM, "rtf", False, True),
    (TnnForSequenceClassification, "modal", True, True),
    (TnnForSequenceClassification, "ski", False, True),
]
ALL_HEADS = [
    (head, tno_type, causal, mask)
    for tno_type, causal in OPERATORS
    for head in (TnnModel, TnnForCausalLM if causal else TnnForMaskedLM, TnnForSequenceClassification)
    for mask in (False, True)
]


@pytest.mark.parametrize(
    "head, tno_type, causal, mask", [*HEADS, *exhaustive(*(case for case in ALL_HEADS if case not in HEADS))]
)
def test_heads(head, tno_type, causal, mask):
    model = seeded(head, tiny_config(tno_type, causal, use_cache=False))
    program = exported(model, batch(3, 11, mask), KINDS["range"]())
    check_program(lambda inputs: program(**inputs)[0], model, mask)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("tno_type, causal", OPERATORS)
def test_jit_trace(tno_type, causal):
    """Traced with a mask that hides nothing, of a batch shorter than any kernel; then with padding at all lengths."""
    config = tiny_config(tno_type, causal, use_cache=False, return_dict=False, modal_window=20)
    model = seeded(TnnModel, config)
    ids = torch.randint(3, 99, (3, 11))
    program = torch.jit.trace(model, (ids, torch.ones_like(ids)), check_trace=False)
    check_program(lambda inputs: program(*inputs.values())[0], model, mask=True)


@pytest.mark.slow
def test_compiled_rtf_beyond_its_truncation():
    """One more graph, whose size does not depend on the length."""
    torch.compiler.reset()
    model = language_model("rtf", True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (P + 1, 130, 4 * P):
        inputs = batch(2, length)
        assert relative_error(compiled(**inputs)[0], model(**inputs)[0]) < 1e-5


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="torch 2.11 cannot prove min(L, 2 L) = L")
def test_pairs():
    model = seeded(TnnForSequencePairClassification, tiny_config("fd", False))
    sizes = {0: Dim("pairs", min=1, max=64), 2: Dim("length", min=2, max=4 * P)}
    program = exported(model, {"input_ids": torch.randint(3, 99, (3, 2, 11))}, sizes)
    for pairs, length in ((1, 2), (5, 17), (2, P + 1), (1, 4 * P)):
        inputs = {"input_ids": torch.randint(3, 99, (pairs, 2, length))}
        assert relative_error(program(**inputs)[0], model(**inputs)[0]) < 1e-5


def test_images():
    """An exported image model takes any number of images of one size."""
    fields = {"spatial_dims": 2, "image_size": 24, "patch_size": 4, "max_position_embeddings": 36, "rtf_state_size": 4}
    model = seeded(TnnForImageClassification, tiny_config("rtf", False, **fields))
    program = exported(model, {"pixel_values": torch.rand(3, 3, 24, 24)}, {0: Dim("batch", min=1, max=64)})
    for rows in (1, 2, 7):
        images = torch.rand(rows, 3, 24, 24)
        assert relative_error(program(pixel_values=images)[0], model(images)[0]) < 1e-5


@pytest.mark.parametrize(
    "tno_type, causal, mask",
    [pytest.param(*ONE_FOR_ONNX, marks=pytest.mark.slow)]
    + exhaustive(*((*case, mask) for case in OPERATORS for mask in (False, True) if (*case, mask) != ONE_FOR_ONNX)),
)
def test_onnx(tno_type, causal, mask, tmp_path):
    """In onnxruntime."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = language_model(tno_type, causal)
    inputs = batch(3, 11, mask)
    sizes = {name: KINDS["dynamic"]() for name in inputs}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])

    def run(inputs):
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])

    check_program(run, model, mask)


@pytest.mark.parametrize("size", [2, 6, 64, 70])
def test_transforms_by_matrices(size):
    x = torch.randn(3, size - 1, dtype=torch.float64)
    spectrum = matrix_transform(x, size)
    torch.testing.assert_close(torch.complex(*spectrum), torch.fft.rfft(x, n=size))
    torch.testing.assert_close(inverse_matrix_transform(spectrum, size, 1, size - 1)[:, : size - 2], x[:, 1:])
    other = torch.randn(2, 3, size // 2 + 1, dtype=torch.float64)
    quotient = torch.complex(*spectrum) / torch.complex(*other)
    torch.testing.assert_close(torch.complex(*spectrum.over(Pair(*other))), quotient)


def test_circular_products_and_quotients():
    x, kernel = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    y = exported_convolution(x, kernel, 12, 0)
    expected = torch.fft.irfft(torch.fft.rfft(x, n=12) * torch.fft.rfft(kernel, n=12), n=12)
    torch.testing.assert_close(y, expected[..., :7])
    torch.testing.assert_close(exported_quotient(expected[0], kernel, 12, 7), x[0])


@pytest.mark.parametrize("radius", [0.5, 0.999, 1.02])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 200])
def test_rational_kernel_of_any_length(radius, length):
    """Beyond its truncation the kernel continues by the recursion, also with poles on and outside the unit circle."""
    angle = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    a = torch.stack([-2 * radius * angle.cos(), torch.full_like(angle, radius**2)], dim=1)  # (3, 2)
    taps = rational_kernel(a, torch.ones(6, 2, dtype=torch.float64), 16)
    expected = taps[:, :length] if length <= 16 else extend_kernel(a, taps, length)
    assert relative_error(kernel_of_any_length(a, taps, length), expected) < 1e-7
