"""Evo 2 (StripedHyena 2) as `golden/evo2` describes it: released names and shapes, and a definition of the model."""

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, pad, silu

from modeling_tnn.original.evo2 import RELEASED

# Options of `evo2-tiny`, a layer of each kind and one more.
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "inner_mlp_size": 176, "state_size": 16,
    "hcs_filter_length": 7, "hcm_filter_length": 128, "hcs_filter_groups": 8, "hcm_filter_groups": 8, "eps": 1e-6,
    "hcs_layer_idxs": [0, 4], "hcm_layer_idxs": [1], "hcl_layer_idxs": [2], "attn_layer_idxs": [3],
    "evo2_style_activations": True, "interleave": True, "column_split_hyena": False, "rotary_emb_base": 10_000,
    "use_interpolated_rotary_pos_emb": True, "rotary_emb_scaling_factor": 4, "max_seqlen": 1024,
}  # fmt: skip
GROUPS = {"vocab_size": 512, "state_size": 16, "hcs_filter_groups": 256, "hcm_filter_groups": 256}
PRESETS = {name: options | GROUPS for name, options in RELEASED.items() if options} | {"evo2-tiny": TINY}


def shapes(options: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of a released state dict, by name."""
    d, inner, states = options["hidden_size"], options["inner_mlp_size"], options["state_size"]
    taps = {kind: (options[f"{kind}_filter_groups"], 1, options[f"{kind}_filter_length"]) for kind in ("hcs", "hcm")}
    hyena = {"projections.weight": (3 * d, d), "filter.short_filter_weight": (3 * d, 1, 3)}
    hyena |= {"out_filter_dense.weight": (d, d), "out_filter_dense.bias": (d,)}
    attention = {"Wqkv.weight": (3 * d, d), "out_proj.weight": (d, d), "out_proj.bias": (d,)}
    mixers = {
        "hcs": hyena | {"filter.h": taps["hcs"]},
        "hcm": hyena | {"filter.h": taps["hcm"], "filter.D": (d,)},
        "hcl": hyena | {"filter.log_poles": (d, states, 1), "filter.residues": (d, states), "filter.D": (d,)},
        "attn": {f"inner_mha_cls.{name}": shape for name, shape in attention.items()},
    }
    around = {"pre_norm.scale": (d,), "post_norm.scale": (d,)}
    around |= {"mlp.l1.weight": (inner, d), "mlp.l2.weight": (inner, d), "mlp.l3.weight": (d, inner)}
    blocks = {f"blocks.{index}.{name}": shape for kind, mixer in mixers.items()
              for index in options[f"{kind}_layer_idxs"] for name, shape in (around | mixer).items()}  # fmt: skip
    return {"embedding_layer.weight": (options["vocab_size"], d), "norm.scale": (d,)} | blocks


def released(options: dict, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random weights of these options. The poles decay, and stay in float32 or wider."""
    made = {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes(options).items()}
    made |= {name: -value.abs() for name, value in made.items() if name.endswith("log_poles")}
    exact = ("log_poles", "residues")
    kept = torch.promote_types(dtype, torch.float32)
    return {name: value.to(kept if name.endswith(exact) else dtype) for name, value in made.items()}


def logits(weights: dict[str, torch.Tensor], options: dict, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the released model, `(b, L, V)`, by sums over all lags. It is slow."""
    x = weights["embedding_layer.weight"][ids]
    act = {"gelu": gelu, "silu": silu}[options.get("mlp_activation", "gelu")]
    kinds = {index: kind for kind in ("hcs", "hcm", "hcl", "attn") for index in options[f"{kind}_layer_idxs"]}
    for index in range(len(kinds)):

        def w(name: str, block: str = f"blocks.{index}.") -> torch.Tensor | None:
            return weights.get(block + name)

        mixer = attention if kinds[index] == "attn" else hyena
        x = x + mixer(w, options, norm(x, w("pre_norm.scale"), options["eps"]))
        y = norm(x, w("post_norm.scale"), options["eps"])
        gate = y @ w("mlp.l1.weight").t()
        gate = gate if index and options.get("evo2_style_activations") else act(gate)
        x = x + (gate * (y @ w("mlp.l2.weight").t())) @ w("mlp.l3.weight").t()
    return norm(x, weights["norm.scale"], options["eps"]) @ weights["embedding_layer.weight"].t()


def norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return scale * x / (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5 + eps)


def convolve(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """y_t = sum_k taps_k x_(t-k) for each channel: `(b, L, c)` and `(c, m)`, from lag 0 on."""
    length = x.shape[1]
    return sum(taps[:, k] * pad(x, (0, 0, k, 0))[:, :length] for k in range(min(length, taps.shape[1])))


def hyena(w: Callable, options: dict, x: torch.Tensor) -> torch.Tensor:
    d, heads, length = x.shape[-1], options["num_attention_heads"], x.shape[1]
    z = convolve(x @ w("projections.weight").t(), w("filter.short_filter_weight")[:, 0].flip(1))
    if options["interleave"]:
        z = torch.cat([z[..., part::3] for part in range(3)], -1)
    blocks = z.unflatten(-1, (heads if options["column_split_hyena"] else 1, 3, -1))
    x2, x1, v = (blocks[..., part, :].flatten(2) for part in range(3))
    if options.get("hyena_flip_x1x2"):
        x1, x2 = x2, x1
    if (poles := w("filter.log_poles")) is not None:
        lags = torch.arange(length, dtype=poles.dtype)
        taps = (w("filter.residues")[..., None] * (poles * lags).exp()).sum(1)  # (d, L)
    else:
        taps = w("filter.h")[:, 0].repeat_interleave(d // len(w("filter.h")), 0)
        taps = taps if taps.shape[1] >= 128 else taps.flip(1)
    u = x1 * v
    skip = w("filter.D")
    y = x2 * (convolve(u, taps) + (0 if skip is None else skip * u))
    return y @ w("out_filter_dense.weight").t() + w("out_filter_dense.bias")


def attention(w: Callable, options: dict, x: torch.Tensor) -> torch.Tensor:
    heads, (b, length, d) = options["num_attention_heads"], x.shape
    split = (heads, 3, -1) if options.get("column_split", True) else (3, heads, -1)
    axis = -2 if options.get("column_split", True) else -3
    qkv = (x @ w("inner_mha_cls.Wqkv.weight").t()).unflatten(-1, split)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(axis))  # (b, heads, L, width)
    width = q.shape[-1]
    positions = torch.arange(length, dtype=x.dtype)
    if options.get("use_interpolated_rotary_pos_emb"):
        positions = positions / options["rotary_emb_scaling_factor"]
    rates = options["rotary_emb_base"] ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = (positions[:, None] * rates).repeat(1, 2)  # (L, width)
    q, k = (one * angles.cos() + torch.cat([-one[..., width // 2 :], one[..., : width // 2]], -1) * angles.sin()
            for one in (q, k))  # fmt: skip
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, length, d)
    return y @ w("inner_mha_cls.out_proj.weight").t() + w("inner_mha_cls.out_proj.bias")
