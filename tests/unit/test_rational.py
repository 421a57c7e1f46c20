"""The taps of rational transfer functions, a few filters at a time, against the plain transform."""

import pytest
import torch

from helpers.derivatives import plain_taps
from helpers.models import random, relative_error
from modeling_tnn import tno_rtf
from modeling_tnn.tno_rtf import RationalTaps


def parameters(denominators: int, filters: int, order: int):
    return random(denominators, order) * (0.5 / order), random(filters, order), random(filters)


@pytest.mark.parametrize("chunk", [2**18, 64])
@pytest.mark.parametrize("denominators, filters", [(6, 6), (2, 6), (1, 7)])
@pytest.mark.parametrize("order, size, length", [(1, 2, 1), (3, 8, 7), (3, 18, 18), (16, 64, 33)])
def test_taps_and_gradients(denominators, filters, order, size, length, chunk, monkeypatch):
    monkeypatch.setattr(tno_rtf, "CHUNK", chunk)
    inputs = parameters(denominators, filters, order)
    taps, expected = RationalTaps.apply(*inputs, size, length, torch.float64), plain_taps(*inputs, size, length)
    cotangent = random(filters, length).detach()
    assert relative_error(taps, expected) < 1e-13
    gradients = torch.autograd.grad((taps * cotangent).sum(), inputs)
    for actual, wanted in zip(gradients, torch.autograd.grad((expected * cotangent).sum(), inputs), strict=True):
        assert relative_error(actual, wanted) < 1e-12


def test_gradcheck():
    assert torch.autograd.gradcheck(
        lambda a, b, h: RationalTaps.apply(a, b, h, 12, 9, torch.float64), parameters(2, 4, 3)
    )


def test_parameters_alone_are_kept():
    saved = []
    denominator, numerator, direct = (x.detach().float().requires_grad_() for x in parameters(8, 8, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        RationalTaps.apply(denominator, numerator, direct, 512, 512, torch.float64)
    assert sum(saved) == denominator.nbytes + numerator.nbytes
