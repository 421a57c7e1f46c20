"""Small models with attention in some of their layers, and attention by its definition."""

import torch

from helpers.models import tiny_config

ROPE = {"rope_type": "default", "rope_theta": 100.0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
HYBRIDS = {
    "full": {"layer_types": ["toeplitz", "full_attention"], "rope_parameters": ROPE, **HEADS},
    "sliding": {"layer_types": ["sliding_attention", "toeplitz"], "sliding_window": 6, **HEADS},
    "attention": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "rope_parameters": ROPE,
        **HEADS,
    },
    # Layers of different operators, as in Evo 2.
    "layers": {
        "layer_types": ["explicit", "full_attention", "exponential"],
        "per_layer_config": {
            0: {"explicit_length": 5, "num_filter_groups": 8, "hyena_skip": True, "hidden_act": "gelu"}
        },
        "num_hidden_layers": 3,
        "toeplitz_mixer": "hyena",
        "hidden_act": "linear",
        "norm_type": "rmsnorm",
        "final_norm_type": "rmsnorm",
        "rms_norm_eps": 1e-6,
        "output_biases_only": True,
        "rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0},
        **HEADS,
    },
}
DIRECTIONS = (True, False)


def hybrid_config(name, causal=True, tno_type="rpe", **fields):
    return tiny_config(tno_type, causal, **HYBRIDS[name] | {"hidden_dropout_prob": 0.0} | fields)


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """The vectors `x` `(L, d)` as d / 2 complex numbers (i and i + d / 2), each turned by its angle times position."""
    half = x.shape[-1] // 2
    z = torch.complex(x[:, :half], x[:, half:])
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


def attention_by_definition(attention, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The outputs of a `TnnAttention` in float64, one query of one head at a time, for `x` and `real` `(B, L)`."""
    config, size, rows = attention.config, attention.head_dim, []
    for inputs, mask in zip(x, real.bool(), strict=True):
        q, k, v = (p(inputs).unflatten(-1, (-1, size)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        position, outputs = mask.cumsum(0) - 1, torch.zeros_like(q)
        for head in range(config.num_attention_heads):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            query, key = q[:, head], k[:, shared]
            if config.rope_parameters is not None:
                theta, scaled = (
                    config.rope_parameters["rope_theta"],
                    position / config.rope_parameters.get("factor", 1),
                )
                query, key = rotated(query, scaled, theta), rotated(key, scaled, theta)
            for i in range(len(inputs)):
                seen = [j for j in range(len(inputs)) if mask[j] and sees(attention, i, j)]
                if seen:
                    weights = (key[seen] @ query[i] / size**0.5).softmax(0)
                    outputs[i, head] = weights @ v[seen, shared]
        rows.append(attention.o_proj(outputs.flatten(1)))
    return torch.stack(rows)


def sees(attention, i: int, j: int) -> bool:
    """Whether token i sees token j."""
    if attention.config.causal:
        return j <= i and (attention.sliding_window is None or i - j < attention.sliding_window)
    return attention.sliding_window is None or abs(i - j) <= attention.sliding_window
