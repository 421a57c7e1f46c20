"""The operator `rtf`: the rational transfer function."""

import pytest
import torch

from helpers.operators import OperatorTests, random_operator


class TestRtf(OperatorTests):
    tno_type = "rtf"


class TestRtfOfOddLength(OperatorTests):
    tno_type = "rtf"
    fields = {"max_position_embeddings": 63, "rtf_num_denominators": None}


def test_rtf_with_montel_constraint_is_stable():
    operator = random_operator("rtf", True)
    with torch.no_grad():
        operator.denominator.mul_(100)
    form = operator.companion_form()
    assert (form.denominator.abs().sum(-1) < 1).all()
    assert operator.coefficients(1000).isfinite().all()


def test_only_causal_operators_have_a_recurrence():
    with pytest.raises(ValueError, match="causal"):
        random_operator("rtf", False).recurrence()
