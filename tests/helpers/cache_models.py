"""The kinds of causal model that the tests of caches run over, and a text for them."""

import pytest
import torch

from helpers import mixers
from helpers.hybrids import HYBRIDS
from helpers.models import lively_language_model

MODELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None},
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.8, "learnable_decay": True},
    "fd": {"tno_type": "fd", "fd_resolution": 32},
    "rtf": {"tno_type": "rtf"},
    "s4d": {"tno_type": "s4d"},
    "modal": {"tno_type": "modal"},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 50},
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
# Those whose layers hold more than one state have no name above: many tests look into the state of each layer.
MIXED = {
    "hybrid": {"tno_type": "rpe", "decay": 0.9} | HYBRIDS["full"],
    "hyena": {"tno_type": "rpe", "decay": 0.9} | mixers.MIXED["hyena"],
}
WITH_HYBRIDS = pytest.mark.parametrize("name", [*MODELS, *MIXED])
TEXT = torch.randint(2, 99, (2, 160), generator=torch.Generator().manual_seed(0))


def model_of(name, **fields):
    return lively_language_model(**(MODELS | MIXED)[name] | fields)


def states_of(cache):
    """The decoding states of all layers."""
    return [state for layer in cache.layers for state in layer.states.values()]
