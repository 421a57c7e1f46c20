"""The kinds of layer of a model, and the fields of the configuration that belong to attention.

    layer_types = ["toeplitz", "toeplitz", "toeplitz", "full_attention", ..]       one name for each layer

A model whose layers are all Toeplitz has none of the fields: they are None, and are not saved. The names of the fields
and of the layers with attention are those of transformers.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOEPLITZ, FULL, SLIDING = "toeplitz", "full_attention", "sliding_attention"
LAYER_TYPES = (TOEPLITZ, FULL, SLIDING)

FIELDS = (
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "sliding_window",
    "attention_dropout",
)

# A configuration may come from an unknown source: so many names are made of it at most.
MOST_LAYERS = 2**10
LARGEST_SIZE = 2**24

# Width of a head unless the configuration says otherwise.
HEAD_DIM = 64

# The rotary positions that are possible, and the numbers that each needs. Frequencies that follow from the length of
# the text ("dynamic", "longrope") are not: the outputs at the first tokens would change with the tokens behind them.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def has_attention(config: "PreTrainedConfig") -> bool:
    """Whether a layer of the model is attention."""
    return any(kind != TOEPLITZ for kind in config.layer_types)


def all_toeplitz(config: "PreTrainedConfig") -> list[str]:
    """The layers of a model for which the configuration does not say them."""
    return [TOEPLITZ] * min(config.num_hidden_layers, MOST_LAYERS)


def _in_attention(derive: Callable) -> Callable:
    return lambda config: derive(config) if has_attention(config) else None


# Fields that follow from others unless they are set, each from those before it.
DERIVED = {
    "layer_types": all_toeplitz,
    "num_attention_heads": _in_attention(lambda config: max(1, config.hidden_size // HEAD_DIM)),
    "num_key_value_heads": _in_attention(lambda config: config.num_attention_heads),
    "head_dim": _in_attention(lambda config: max(1, config.hidden_size // max(1, config.num_attention_heads))),
    "attention_dropout": _in_attention(lambda config: 0.0),
}

SOURCES = ("num_hidden_layers", "layer_types", "num_attention_heads")


def _size(least: int):
    allowed = f"in [{least}, {LARGEST_SIZE:,}] or None"
    return lambda value: value is None or least <= value <= LARGEST_SIZE, allowed


LIMITS = [
    ("layer_types", (set(LAYER_TYPES).issuperset, f"a list of {', '.join(map(repr, LAYER_TYPES))}")),
    *((name, _size(1)) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")),
    # Of a window of one token, transformers' cache would keep all tokens.
    ("sliding_window", _size(2)),
    ("attention_dropout", (lambda value: value is None or 0 <= value < 1, "in [0, 1)")),
]


def check_layers(config: "PreTrainedConfig"):
    """Check the fields of this file together.

    Raises:
        ValueError: two fields contradict each other.
    """
    kinds, count = config.layer_types, config.num_hidden_layers
    config.require("layer_types", len(kinds) == count, f"a list of num_hidden_layers={count} names")
    if not has_attention(config):
        config.require("rope_parameters", config.rope_parameters is None, "None without layers of attention")
        return
    heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
    config.require("num_key_value_heads", heads % config.num_key_value_heads == 0, f"a divisor of {heads} heads")
    config.require("head_dim", width <= LARGEST_SIZE, f"at most {LARGEST_SIZE:,} for {heads} heads together")
    if SLIDING in kinds:
        config.require("sliding_window", config.sliding_window is not None, f"an integer for layers of {SLIDING!r}")
    if config.rope_parameters is not None:
        _check_rope(config, config.rope_parameters)


def _check_rope(config: "PreTrainedConfig", given: dict[str, Any]):
    flat = not any(isinstance(value, dict) for value in given.values())
    config.require("rope_parameters", flat, "one dict of parameters for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    known = isinstance(kind, str) and kind in ROPE_TYPES
    config.require("rope_parameters", known, f"None or have a rope_type of {', '.join(map(repr, ROPE_TYPES))}")
    for name in ("rope_theta", *ROPE_TYPES[kind]):
        value = given.get(name, 10_000.0 if name == "rope_theta" else None)
        positive = isinstance(value, int | float) and 0 < value < math.inf
        config.require("rope_parameters", positive, f"a dict with a number above 0 as {name!r}")
    whole = given.get("partial_rotary_factor") in (None, 1)
    config.require("rope_parameters", whole, "a dict without a 'partial_rotary_factor' other than 1")
    config.require("head_dim", config.head_dim % 2 == 0, "even with rope_parameters")
