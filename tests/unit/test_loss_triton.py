"""The loss by its Triton kernel against the loss with all logits, in Triton's interpreter or on a GPU.

`make test-slow` runs these in the interpreter. On a machine with a GPU, `pytest tests/unit/test_loss_triton.py` runs
them there, also in bfloat16.
"""

import pytest
import torch

from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.kernels import fallback, loss
from modeling_tnn.kernels.loss import eager_loss, find_kernel, linear_cross_entropy

triton = pytest.importorskip("triton", reason="needs the package triton: `make test-slow` installs it")
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 (see `make test-slow`) or a GPU", allow_module_level=True)

from modeling_tnn.kernels import loss_triton  # noqa: E402 - it needs triton

# On some CPUs the float32 of PyTorch alone is 2e-6 off for 8,201 words, by the order of its sums.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 2e-2


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Words are padded, and there are several chunks, the last one not full."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    monkeypatch.setattr(loss, "LARGE_ROWS", 4)


def head_inputs(rows: int, words: int, bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    shapes = [(rows, 11), (words, 11)] + [(words,)] * bias
    inputs = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(words, (rows,), device=DEVICE)
    labels[1::3] = -100
    return inputs, labels


def by_kernel(inputs, labels, ignore_index=-100):
    return linear_cross_entropy(*(*inputs, None)[:3], labels, ignore_index)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "words"), [(1, 1), (1, 129), (7, 99), (9, 256), (6, 700), (2, loss_triton.BLOCK + 9)]
)
def test_values_and_gradients(rows, words, bias, dtype):
    """One row, several chunks; words that are a multiple of 128 and not, more than a program takes at a time."""
    inputs, labels = head_inputs(rows, words, bias, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = by_kernel(inputs, labels), eager_loss(*exact, labels=labels)
    assert found.dtype == torch.float32 and relative_error(found, expected) < TOLERANCE[dtype]
    factor = torch.tensor(0.3, device=DEVICE)
    gradients = torch.autograd.grad(found, inputs, factor)
    wanted = torch.autograd.grad(expected, exact, factor.double())
    for ours, x, theirs in zip(gradients, inputs, wanted, strict=True):
        assert ours.dtype == x.dtype and (ours.double() - theirs).norm() <= TOLERANCE[dtype] * (1e-6 + theirs.norm())
    assert (gradients[0][1::3] == 0).all()
    again = by_kernel(inputs, labels)
    assert again == found and all(map(torch.equal, torch.autograd.grad(again, inputs, factor), gradients))
    for ignored in (-100, 3):
        none = by_kernel(inputs, torch.full_like(labels, ignored), ignored)
        assert none == 0 and all((g == 0).all() for g in torch.autograd.grad(none, inputs))


def test_a_label_outside_of_the_words():
    """Nothing else is read in its place."""
    inputs, labels = head_inputs(5, 99, False, torch.float32)
    for label in (-1, 99, 2**40):
        labels[0] = label
        assert by_kernel(inputs, labels).isnan()


@pytest.mark.parametrize("causal", [True, False])
def test_a_training_step(causal):
    """Loss and gradients of a model are those of the way with logits; its products are none of Triton."""
    config = tiny_config(causal=causal, hidden_dropout_prob=0.0, tno_implementation="fused")
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, config).to(DEVICE).train()
    ids = torch.arange(39, device=DEVICE).view(3, 13)
    labels = ids.clone()
    labels[1, 4:] = -100
    found = []
    for skip in (True, False):
        model.zero_grad()
        value = model(ids, labels=labels, skip_logits=skip).loss
        value.backward()
        found.append((value, {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_kernel_that_fails(monkeypatch, caplog):
    """One warning, and the loss by PyTorch's operations."""
    monkeypatch.setattr(loss_triton, "loss_kernel", None)
    monkeypatch.setattr(fallback, "FAILED", {})
    monkeypatch.setattr(fallback, "is_interpreted", lambda: False)
    monkeypatch.setattr(loss, "runs_on", lambda device: True)
    find_kernel.cache_clear()
    inputs, labels = head_inputs(7, 99, True, torch.float32)
    with caplog.at_level("WARNING"):
        found = [by_kernel(inputs, labels) for _ in range(2)]
    find_kernel.cache_clear()
    torch.testing.assert_close(found[1], eager_loss(*inputs, labels=labels))
    assert sum("Triton kernel of the loss" in record.message for record in caplog.records) == 1
