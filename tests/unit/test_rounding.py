"""What the product of the GPUs loses in bfloat16, simulated in float64 on models that have learnt something.

Only the product is rounded, so that nothing else moves the perplexity.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.models import relative_error, seeded, tiny_config
from helpers.operators import random_operator
from modeling_tnn import TnnForCausalLM, numerics, toeplitz
from modeling_tnn.kernels import choice
from modeling_tnn.numerics import next_fast_len
from modeling_tnn.tno import kernel_arguments
from modeling_tnn.tno_rpe import RpeOperator
from modeling_tnn.toeplitz_fused import NO_GATE, Gate, Windows, eager_windows

LAYER, PERPLEXITY = 4e-3, 1e-3


def by_operations(v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel` `(D, K)`."""
    size = next_fast_len(v.shape[1] + max(first, kernel.shape[1] - 1 - first))
    windows = Windows(size, size, skip=first)
    return eager_windows(v.permute(2, 0, 1), kernel, None, None, None, windows).permute(1, 2, 0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` with the numbers that bfloat16 has."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate = NO_GATE) -> torch.Tensor:
    """As `kernels.triton.tiled_convolution`: inputs, activated inputs, taps and result are rounded, sums are not."""
    x = rounded(gate.inputs(rounded(v)))
    y = by_operations(x, rounded(kernel), first)
    return rounded(y if gate.u is None else gate.act(rounded(gate.u)) * y)


def rows(length: int, count: int) -> torch.Tensor:
    """Bytes of the King James Bible, the text of the demo."""
    file = Path(find_spec("bible").submodule_search_locations[0]) / "data" / "kjv.jsonl"
    verses = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    text = "".join(verse["text"] for verse in verses).encode()[: length * count]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(count, length)


def trained(tno_type: str, texts: torch.Tensor, steps: int) -> TnnForCausalLM:
    torch.manual_seed(0)
    model = TnnForCausalLM(tiny_config(tno_type, vocab_size=256, hidden_size=64, hidden_dropout_prob=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = texts[8 * step : 8 * step + 8]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.double().eval()


@torch.no_grad()
def loss_of(model, texts: torch.Tensor, implementation: str) -> float:
    for layer in model.model.layers:
        layer.mixer.tno.implementation = implementation
    return cross_entropy(model(texts).logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize("tno_type", ["rpe", "fd", "rtf"])
def test_bfloat16_on_a_trained_model(tno_type, monkeypatch):
    """The error of each layer for the inputs that bfloat16 has, and what becomes of the perplexity."""
    texts, errors = rows(256, 1232), []
    held_out, model = texts[-32:], trained(tno_type, texts[:-32], 150)

    def product(v, kernel, first, gate):
        given = Gate(rounded(gate.u), gate.act, gate.mask)
        exact = given.apply(by_operations(given.inputs(rounded(v)), kernel, first), "eager")
        found = rounded_product(v, kernel, first, gate)
        errors.append(((found - exact).norm() / exact.norm()).item())
        return found

    monkeypatch.setattr(choice, "refused_by_triton", lambda *_: None)
    monkeypatch.setitem(sys.modules, "modeling_tnn.kernels.triton", SimpleNamespace(tiled_convolution=product))
    before = loss_of(model, held_out, "fused")
    change = abs(loss_of(model, held_out, "triton") - before)  # of the logarithm of the perplexity
    print(f"\n{tno_type}: loss {before:.3f}, layers {max(errors):.1e}, perplexity {change:.1e}")
    assert before < 2.8  # it has learnt: letters by their frequency alone have about 3.3
    assert len(errors) == 2 and max(errors) < LAYER
    assert 0 < change < PERPLEXITY


def test_the_simulation_is_the_product():
    """Of numbers that bfloat16 has: only the result is rounded."""
    torch.manual_seed(0)
    v, kernel, u = (rounded(torch.randn(*shape, dtype=torch.float64)) for shape in ((2, 40, 3), (3, 9), (2, 40, 3)))
    exact = toeplitz.causal_toeplitz_matmul(v, kernel, "eager", Gate(u, torch.relu))
    found = rounded_product(v, kernel, 0, Gate(u, torch.relu))
    assert relative_error(found, rounded(exact)) < 1e-12 < relative_error(found, exact)


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("explicit", False)])
def test_taps_that_half_precision_leaves_out(tno_type, causal):
    """They are 759 of 1,587 at a decay of 0.99, and the error of a layer in bfloat16 is the same without them."""
    operator = random_operator(tno_type, causal, decay=0.99, explicit_length=1587).double()
    torch.manual_seed(0)
    v, errors = rounded(torch.randn(1, 2048, operator.channels, dtype=torch.float64)), []
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert [kernel_arguments(operator, v.to(dtype))[0] for dtype in dtypes] == [828, 828, 2048]
    kernels = [operator.coefficients(lags) for lags in (2048, 1587, 828)]
    first = [0 if causal else kernel.shape[1] // 2 for kernel in kernels]
    exact = by_operations(v, kernels[0], first[0])
    for kernel, lag in zip(kernels[1:], first[1:], strict=True):
        errors.append(((rounded_product(v, kernel, lag) - exact).norm() / exact.norm()).item())
    print(f"\n{tno_type}: {errors[0]:.3e} with 1,587 taps, {errors[1]:.3e} with 828")
    assert errors[0] < LAYER and errors[1] < 1.05 * errors[0]


def test_lags_follow_the_activations(monkeypatch):
    """At a decay of 0.9, float32 has 152 and half precision 79, wherever the kernel is made."""
    found, coefficients = [], RpeOperator.coefficients

    def counted(self, length, device=None):
        found.append(length)
        return coefficients(self, length, device)

    monkeypatch.setattr(RpeOperator, "coefficients", counted)
    ids, model = torch.arange(200)[None] % 99, seeded(TnnForCausalLM, tiny_config(decay=0.9, use_cache=False))
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            model(ids)
    assert found == [152, 152, 79, 79]
    found.clear()
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())  # the kernels of both layers in one go
    with torch.autocast("cpu", torch.float16):
        model(ids)
    model.half()(ids)
    model.float()(ids)
    assert found == [79, 79, 152]
    found.clear()
    torch.export.export(model.half(), (), {"input_ids": ids}, strict=False)
    assert found == [200, 200]  # which serves any length
