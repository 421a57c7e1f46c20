"""The operator `ski`: the sparse plus low-rank operator."""

import pytest
import torch

from helpers.models import relative_error
from helpers.operators import OperatorTests, random_operator
from modeling_tnn import numerics, tno_ski
from modeling_tnn.toeplitz import dense_toeplitz


class TestSki(OperatorTests):
    tno_type = "ski"


def test_ski_is_exactly_toeplitz_at_full_rank():
    operator = random_operator("ski", False, ski_rank=64)
    assert relative_error(operator.dense(64), dense_toeplitz(operator.coefficients(64))) < 1e-13


def test_ski_approximates_its_kernel():
    """Linear interpolation of a smooth kernel: the error falls with the square of the distance of the points."""
    errors = []
    for rank in (9, 33):
        operator = random_operator("ski", False, ski_rank=rank, max_position_embeddings=65, ski_decay=0.99)
        ramp = torch.arange(1, rank + 1, dtype=torch.float64) / rank
        with torch.no_grad():
            operator.alphas.copy_(ramp)
            operator.betas.copy_(ramp.flip(0))
        errors.append(relative_error(operator.dense(65), dense_toeplitz(operator.coefficients(65))))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("largest", [0, 10**6])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 201])
def test_on_an_accelerator(length, largest, monkeypatch):
    """With the matrix of the interpolation or, where it would be too large, in blocks."""
    operator = random_operator("ski", False)
    v = torch.randn(2, length, operator.channels, dtype=torch.float64, requires_grad=True)
    results = []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        monkeypatch.setattr(tno_ski, "LARGEST_MATRIX", largest)
        y = operator(v)
        results.append([y, *torch.autograd.grad(y.square().sum(), [v, *operator.parameters()])])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-12
