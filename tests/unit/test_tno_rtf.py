"""The operator `rtf`: the rational transfer function."""

import pytest
import torch

from helpers.models import lively_language_model
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


def test_texts_that_decode_together():
    """From four texts on, steps on a CPU share blocks. Their coefficients are shorter than a block, or longer."""
    for order in (1, 7, 8, 20):
        model = lively_language_model(tno_type="rtf", rtf_state_size=order)
        prompt = torch.arange(40).view(5, 8) * 2 + 3
        options = {"max_new_tokens": 20, "do_sample": False}
        assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))
    with pytest.raises(ValueError, match="causal"):
        random_operator("rtf", False).recurrence()
