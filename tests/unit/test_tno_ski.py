"""The operator `ski`: the sparse plus low-rank operator."""

import torch

from helpers.models import relative_error
from helpers.operators import OperatorTests, random_operator
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
