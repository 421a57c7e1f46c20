"""Strategies of hypothesis: configurations of every variant, lengths, masks, splits of a sequence, tensors.

Small values first: hypothesis shrinks a failure to the smallest model and the shortest text that show it.
"""

import torch
from hypothesis import strategies as st

from helpers.models import BIDIRECTIONAL, CAUSAL
from modeling_tnn import TnnConfig
from modeling_tnn.configuration_tnn import CHOICES, GTU, HYENA, S4
from modeling_tnn.norms import NORM_TYPES

VOCAB_SIZE = 37
ACTIVATIONS = ("relu", "silu", "gelu", "tanh")
lengths = st.integers(1, 80)
seeds = st.integers(0, 2**16)


def decays():
    return st.one_of(st.none(), st.just(1.0), st.floats(0.3, 0.999))


def rpe_fields(draw, causal):
    decay = draw(decays())
    return {
        "decay": decay,
        "learnable_decay": decay is not None and draw(st.booleans()),
        "rpe_layers": draw(st.integers(0, 3)),
        "rpe_input": draw(st.sampled_from(("lag", "normalized", "sinusoidal"))),
        "rpe_act": draw(st.sampled_from(ACTIVATIONS)),
        "rpe_residual": draw(st.booleans()),
        "rpe_hidden_norm": draw(st.booleans()),
        "rpe_window": draw(st.one_of(st.none(), st.integers(1, 90))),
    }


def fd_fields(draw, causal):
    return {
        "fd_resolution": 2 ** draw(st.integers(0, 7)),
        "fd_input": draw(st.sampled_from(("omega", "cos"))),
        "fd_act": draw(st.sampled_from(ACTIVATIONS)),
    }


def ski_fields(draw, causal):
    longest = draw(st.integers(2, 80))
    return {
        "max_position_embeddings": longest,
        "ski_rank": draw(st.integers(2, longest)),
        "ski_filter_size": draw(st.integers(1, 9)),
        "ski_decay": draw(st.floats(0.5, 1.0)),
        "ski_interpolation": draw(st.sampled_from(CHOICES["ski_interpolation"])),
        "ski_initializer": draw(st.sampled_from(("local", "normal"))),
    }


def rtf_fields(draw, causal):
    longest = draw(st.integers(2, 80))
    return {
        "max_position_embeddings": longest,
        "rtf_state_size": draw(st.integers(1, min(longest - 1, 12))),
        "rtf_num_denominators": draw(st.sampled_from((None, 1, 2, 4))),
        # Without the constraint, and away from zeros, poles may lie outside the unit circle: test_numerics.py.
        "rtf_constraint": "l1_montel",
        "rtf_initializer": draw(st.sampled_from(("montel", "xavier", "zeros"))),
    }


def s4d_fields(draw, causal):
    return {
        "s4d_state_size": 2 * draw(st.integers(1, 6)),
        "s4d_initializer": draw(st.sampled_from(("lin", "inv", "legs"))),
        "s4d_discretization": draw(st.sampled_from(("zoh", "bilinear"))),
        "s4d_dt_min": draw(st.floats(1e-4, 0.1)),
        "s4d_dt_max": draw(st.floats(0.1, 1.0)),
    }


def modal_fields(draw, causal):
    return {"num_modes": draw(st.integers(1, 6)), "modal_window": draw(st.integers(1, 9))}


def exponential_fields(draw, causal):
    return {"num_modes": draw(st.integers(1, 6))}


def explicit_fields(draw, causal):
    return {"decay": draw(decays())}


def hyena_fields(draw, causal):
    return {
        "hyena_filter_beyond": "zeros",
        "hyena_filter_length": draw(st.integers(1, 90)),
        "hyena_filter_order": draw(st.integers(1, 9)),
        "hyena_filter_emb_dim": draw(st.sampled_from((3, 5, 7))),
        "hyena_filter_inner_mlps": draw(st.integers(0, 2)),
        "hyena_filter_freq": draw(st.floats(0.1, 10.0)),
    }


def mixer_fields(draw, causal):
    """The gated Toeplitz unit more often than the others, because it has more fields of its own."""
    mixer = draw(st.sampled_from((GTU, GTU, GTU, HYENA, S4)))
    if mixer == HYENA:
        sizes = st.integers(1, 5) if causal else st.sampled_from((1, 3, 5))
        mixer_only = {"short_conv_kernel": draw(sizes), "hyena_rank": draw(st.sampled_from((None, 3)))}
        mixer_only |= {"hyena_skip": draw(st.booleans())}
    else:
        mixer_only = {"gtu_expansion": 1, "gtu_norm": False} if mixer == S4 else {}
    return {"toeplitz_mixer": mixer} | mixer_only


FIELDS = {
    "rpe": rpe_fields,
    "fd": fd_fields,
    "ski": ski_fields,
    "rtf": rtf_fields,
    "s4d": s4d_fields,
    "modal": modal_fields,
    "exponential": exponential_fields,
    "explicit": explicit_fields,
    "hyena": hyena_fields,
}


@st.composite
def configs(draw, causal: bool | None = None, tno_types: tuple[str, ...] | None = None) -> TnnConfig:
    """Any combination of the options of a variant, of the norms and of the parts of a block."""
    if causal is None:
        causal = draw(st.booleans())
    tno_type = draw(st.sampled_from(tno_types or (CAUSAL if causal else BIDIRECTIONAL)))
    # A batch norm does not treat the rows of a batch apart while it trains; it has tests of its own.
    norm_type = draw(st.sampled_from([name for name in NORM_TYPES if name != "batchnorm"]))
    hidden_act = draw(st.sampled_from(ACTIVATIONS))
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": draw(st.sampled_from((4, 8, 12))),
        "gtu_expansion": draw(st.sampled_from((1, 2))),
        "intermediate_size": draw(st.sampled_from((3, 8))),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "max_position_embeddings": draw(st.integers(2, 80)),
        "use_glu": draw(st.booleans()),
        # ReLU makes gated products that are zero but for the rounding of a transform, and the norm 1e8 times as much.
        "gtu_norm": hidden_act != "relu" and draw(st.booleans()),
        "hidden_act": hidden_act,
        "norm_type": norm_type,
        "final_norm_type": draw(st.sampled_from((None, "rmsnorm", "scalenorm"))),
        "output_biases_only": draw(st.booleans()),
        "norm_position": draw(st.sampled_from(("pre", "post", "res_post"))),
        "scale_embedding": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "position_embedding": draw(st.sampled_from((None, "sinusoidal"))),
        "rpe_dim": 8,
        "tno_implementation": draw(st.sampled_from(("auto", "fused", "eager"))),
        "tie_word_embeddings": draw(st.booleans()),
        "classifier_pooling": draw(st.sampled_from((None, "last", "mean"))),
        "eos_token_id": None,
    }
    fields |= FIELDS[tno_type](draw, causal)
    return TnnConfig(tno_type=tno_type, causal=causal, **fields | mixer_fields(draw, causal))


@st.composite
def splits(draw, most: int = 70) -> list[int]:
    """Lengths of the chunks that a text comes in."""
    return draw(st.lists(st.integers(1, most), min_size=2, max_size=6))


def tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    """Random ids `(rows, length)`."""
    return torch.randint(VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
