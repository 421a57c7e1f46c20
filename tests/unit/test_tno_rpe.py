"""The operator `rpe`: coefficients from the position encoder."""

import pytest
import torch

from helpers.models import relative_error
from helpers.operators import OperatorTests, random_operator


class TestRpe(OperatorTests):
    tno_type = "rpe"


class TestRpeWithoutDecay(OperatorTests):
    tno_type = "rpe"
    fields = {"decay": None}


class TestRpeWithLearnedDecay(OperatorTests):
    tno_type = "rpe"
    fields = {"decay": 0.8, "learnable_decay": True, "rpe_window": 30}


@pytest.mark.parametrize("decay", [None, 1, 0.9])
def test_decay(decay):
    plain, decayed = random_operator("rpe", False, decay=None), random_operator("rpe", False, decay=decay)
    lags = torch.arange(-49, 50, dtype=torch.float64).abs()
    expected = plain.coefficients(50) * (1.0 if decay is None else decay) ** lags
    assert relative_error(decayed.coefficients(50), expected) < 1e-14


def test_learnable_decay_stays_between_its_bound_and_one():
    operator = random_operator("rpe", True, decay=0.9, learnable_decay=True)
    with torch.no_grad():
        operator.decay_logit.copy_(torch.linspace(-50, 50, operator.channels))
    plain = random_operator("rpe", True, decay=None)
    plain.load_state_dict(operator.state_dict(), strict=False)
    ratio = (operator.coefficients(11) / plain.coefficients(11))[:, 10]
    assert ratio[0].item() == pytest.approx(0.9**10)
    assert ratio[-1].item() == pytest.approx(1.0)
