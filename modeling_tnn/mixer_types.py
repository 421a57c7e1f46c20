"""The token mixers of Toeplitz layers by name, and the fields of the configuration that belong to them.

    gtu      y = W_o( act(W_u x) * TNO(act(W_v x)) )                               the default, `gtu.py`
    hyena    y = W_o( p * TNO(q * v) ),    p, q, v = short convolutions of W x     `hyena.py`
    s4       y = GLU( W act(TNO(x)) )                                              `s4.py`

Every operator can stand in every mixer. A model of gated Toeplitz units has the defaults of these fields.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GTU, HYENA, S4 = "gtu", "hyena", "s4"
MIXERS = (GTU, HYENA, S4)

FIELDS = ("toeplitz_mixer", "short_conv_kernel", "hyena_rank", "hyena_norm")

# Longer filters are what the operator is for.
MOST_TAPS = 64

LARGEST_RANK = 2**24

LIMITS = [
    ("toeplitz_mixer", (MIXERS.__contains__, f"one of {', '.join(map(repr, MIXERS))}")),
    ("short_conv_kernel", (lambda value: 1 <= value <= MOST_TAPS, f"in [1, {MOST_TAPS}]")),
    ("hyena_rank", (lambda value: value is None or 1 <= value <= LARGEST_RANK, f"in [1, {LARGEST_RANK:,}] or None")),
]


def check_mixer(config: "PreTrainedConfig"):
    """Check the fields of this file together with those that they depend on.

    Raises:
        ValueError: two fields contradict each other.
    """
    if config.toeplitz_mixer == HYENA:
        config.require("spatial_dims", config.spatial_dims == 1, "1 with toeplitz_mixer='hyena', a mixer of sequences")
        centred = config.causal or config.short_conv_kernel % 2 == 1
        config.require("short_conv_kernel", centred, "odd with causal=False")
        config.require("hyena_norm", not (config.hyena_norm and config.gtu_norm), "False with gtu_norm, another norm")
    if config.toeplitz_mixer == S4:
        whole = config.gtu_dim == config.hidden_size
        config.require("gtu_expansion", whole, "1 with toeplitz_mixer='s4', whose operator mixes the input itself")
        config.require("gtu_norm", not config.gtu_norm, "False with toeplitz_mixer='s4', which has no gated product")
