"""How many operations a layer starts on an accelerator, in a training step and for a token.

A small model on a GPU waits for launches, not for arithmetic. A budget is what a layer needed when it was set. It may
be lowered; who raises it says why. Views and allocations start nothing and are not counted.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import CAUSAL, VARIANTS, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics

NO_LAUNCH = {"detach", "lift_fresh", "promote_types", "set_", "_unsafe_view", "empty", "empty_like", "empty_strided",
             "new_empty", "new_empty_strided"}  # fmt: skip
# (operator, causal) -> operations of a layer.
TRAINING = dict.fromkeys(VARIANTS, 105) | {
    ("rtf", True): 106, ("ski", False): 142, ("rtf", False): 108, ("s4d", False): 109,
}  # fmt: skip
TOKEN = dict.fromkeys(CAUSAL, 25) | {"rtf": 31}


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function.overloadpacket.__name__ not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


# Other versions of PyTorch compose the same functions of other operations.
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the budgets are of PyTorch 2.13")


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())


def model_of(layers: int, tno_type: str, causal: bool):
    config = tiny_config(tno_type, causal, num_hidden_layers=layers, hidden_dropout_prob=0.0)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def of_a_layer(count, tno_type: str, causal: bool) -> int:
    """The difference between a model of three layers and one of two."""
    three, two = (count(model_of(layers, tno_type, causal)) for layers in (3, 2))
    return three - two


def training_step(model) -> int:
    ids = torch.arange(80).view(2, 40)
    with Launches() as launches:
        model.train()(ids, labels=ids).loss.backward()
    return launches.count


@torch.no_grad()
def token(model) -> int:
    ids = torch.arange(80).view(2, 40)
    cache = model(ids, use_cache=True).past_key_values
    for _ in range(5):  # the first token after a prompt makes the state
        model(ids[:, :1], past_key_values=cache)
    with Launches() as launches:
        model(ids[:, :1], past_key_values=cache)
    return launches.count


def test_a_training_step():
    found = {variant: of_a_layer(training_step, *variant) for variant in VARIANTS}
    assert not {variant: count for variant, count in found.items() if count > TRAINING[variant]}


def test_a_token():
    found = {name: of_a_layer(token, name, True) for name in CAUSAL}
    assert not {name: count for name, count in found.items() if count > TOKEN[name]}
