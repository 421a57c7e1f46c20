"""Operators, products and models whose derivatives the tests compare: fused and eager, in float64."""

import pytest
import torch
from torch.nn.functional import silu

from helpers.models import BIDIRECTIONAL, CAUSAL, random, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rtf import rational_kernel
from modeling_tnn.toeplitz import causal_toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate


def plain_taps(denominator, numerator, direct, size, length):
    taps = rational_kernel(denominator, numerator, size)
    return torch.cat([taps[:, :1] + direct[:, None], taps[:, 1:]], dim=1)[:, :length]


WAYS = ("fused", "eager")
OPERATORS = [(name, causal, {}) for causal in (True, False) for name in (CAUSAL if causal else BIDIRECTIONAL)]
OPERATORS += [
    ("rpe", True, {"decay": 0.9, "learnable_decay": True}),
    ("rpe", False, {"rpe_window": 2}),
    ("rtf", True, {"rtf_constraint": None, "rtf_num_denominators": 1}),
    ("rtf", False, {"rtf_constraint": None, "rtf_num_denominators": None}),
    ("rpe", False, {"spatial_dims": 2}),
]


def operator_name(operator) -> str:
    name, causal, fields = operator
    return "-".join([name, "causal" if causal else "bidirectional", *fields])


every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=operator_name)


def mask_of(length: int) -> torch.Tensor:
    return torch.arange(length).expand(2, length) % 3 != 1


def gated(product, v, kernel, u, matmul=causal_toeplitz_matmul, mask=None):
    return matmul(v, kernel, product, Gate(u, silu, mask))


def operator_and_input(operator, product, length=17):
    tno_type, causal, fields = operator
    two_axes = "spatial_dims" in fields
    config = tiny_config(tno_type, causal, hidden_size=4, tno_implementation=product, **fields)
    torch.manual_seed(0)
    tno = build_tno(config, 0).double()
    for parameter in tno.parameters():
        torch.nn.init.uniform_(parameter, -0.3, 0.3)
    return tno, random(2, 25 if two_axes else length, 8)


def language_model(operator, product):
    tno_type, causal, fields = operator
    config = tiny_config(tno_type, causal, hidden_size=8, vocab_size=23, tno_implementation=product, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config).double()
