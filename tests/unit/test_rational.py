"""The taps of rational transfer functions, a few filters at a time, against the plain transform."""

import pytest
import torch

from helpers.models import random, relative_error
from helpers.products import compare_derivatives
from modeling_tnn import tno_rtf
from modeling_tnn.tno_rtf import RationalTaps, rational_kernel

SIZES = [(1, 2, 1), (3, 8, 7), (3, 18, 18), (16, 64, 33)]


def plain_taps(denominator, numerator, direct, size, length):
    taps = rational_kernel(denominator, numerator, size)
    return torch.cat([taps[:, :1] + direct[:, None], taps[:, 1:]], dim=1)[:, :length]


def fused_taps(denominator, numerator, direct, size, length):
    return RationalTaps.apply(denominator, numerator, direct, size, length, torch.float64)


def parameters(denominators: int, filters: int, order: int):
    return random(denominators, order) * (0.5 / order), random(filters, order), random(filters)


@pytest.mark.parametrize("chunk", [2**18, 64])
@pytest.mark.parametrize("denominators, filters", [(6, 6), (2, 6), (1, 7)])
def test_taps_and_derivatives(denominators, filters, chunk, monkeypatch):
    """Of three orders; against differences too."""
    monkeypatch.setattr(tno_rtf, "CHUNK", chunk)
    for order, size, length in SIZES:
        inputs = parameters(denominators, filters, order)
        assert relative_error(fused_taps(*inputs, size, length), plain_taps(*inputs, size, length)) < 1e-13
        ways = [lambda *x, way=way, s=size, n=length: way(*x, s, n) for way in (fused_taps, plain_taps)]
        compare_derivatives(ways, inputs)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *x: fused_taps(*x, 8, 7), parameters(denominators, filters, 2))


def test_parameters_alone_are_kept():
    saved = []
    denominator, numerator, direct = (x.detach().float().requires_grad_() for x in parameters(8, 8, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        RationalTaps.apply(denominator, numerator, direct, 512, 512, torch.float64)
    assert sum(saved) == denominator.nbytes + numerator.nbytes
