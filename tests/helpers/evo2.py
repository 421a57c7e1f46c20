"""Evo 2 (StripedHyena 2) as `golden/evo2` describes it: released names and shapes, and a definition of the model."""

import torch
from torch.nn.functional import gelu, pad, silu

from tnn_programs.original.evo2 import RELEASED

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


def kinds(options: dict) -> dict[int, str]:
    return {index: kind for kind in ("hcs", "hcm", "hcl", "attn") for index in options[f"{kind}_layer_idxs"]}


def shapes(options: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of a released state dict, by name."""
    d, inner, states = options["hidden_size"], options["inner_mlp_size"], options["state_size"]
    hyena = {"projections.weight": (3 * d, d), "filter.short_filter_weight": (3 * d, 1, 3), "filter.D": (d,),
             "out_filter_dense.weight": (d, d), "out_filter_dense.bias": (d,)}  # fmt: skip
    mixers = {kind: hyena | {"filter.h": (options[f"{kind}_filter_groups"], 1, options[f"{kind}_filter_length"])}
              for kind in ("hcs", "hcm")}  # fmt: skip
    del mixers["hcs"]["filter.D"]
    mixers["hcl"] = hyena | {"filter.log_poles": (d, states, 1), "filter.residues": (d, states)}
    mha = {"Wqkv.weight": (3 * d, d), "out_proj.weight": (d, d), "out_proj.bias": (d,)}
    mixers["attn"] = {f"inner_mha_cls.{name}": shape for name, shape in mha.items()}
    around = {"mlp.l1.weight": (inner, d), "mlp.l2.weight": (inner, d), "mlp.l3.weight": (d, inner),
              "pre_norm.scale": (d,), "post_norm.scale": (d,)}  # fmt: skip
    return {"embedding_layer.weight": (options["vocab_size"], d), "norm.scale": (d,)} | {
        f"blocks.{index}.{name}": shape for index, kind in kinds(options).items()
        for name, shape in (around | mixers[kind]).items()
    }  # fmt: skip


def released(options: dict, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random weights of these options. The poles decay, and they and the residues stay in float32 or wider."""
    made = {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes(options).items()}
    made |= {name: -value.abs() for name, value in made.items() if name.endswith("log_poles")}
    wide = torch.promote_types(dtype, torch.float32)
    return {name: one.to(wide if name.endswith(("log_poles", "residues")) else dtype) for name, one in made.items()}


def logits(weights: dict[str, torch.Tensor], options: dict, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the released model, `(b, L, V)`, by sums over all lags. It is slow."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * x / (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5 + options["eps"])

    x, act = weights["embedding_layer.weight"][ids], silu if options.get("mlp_activation") == "silu" else gelu
    for index, kind in sorted(kinds(options).items()):
        start = f"blocks.{index}."
        w = {name.removeprefix(start): one for name, one in weights.items() if name.startswith(start)}
        x = x + (attention if kind == "attn" else hyena)(w, options, norm(x, f"{start}pre_norm.scale"))
        y = norm(x, f"{start}post_norm.scale")
        gate = y @ w["mlp.l1.weight"].t()
        gate = gate if index and options.get("evo2_style_activations") else act(gate)
        x = x + (gate * (y @ w["mlp.l2.weight"].t())) @ w["mlp.l3.weight"].t()
    return norm(x, "norm.scale") @ weights["embedding_layer.weight"].t()


def convolve(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """y_t = sum_k taps_k x_(t-k) for each channel: `(b, L, c)` and `(c, m)`, from lag 0 on."""
    return sum(taps[:, k] * pad(x, (0, 0, k, 0))[:, : x.shape[1]] for k in range(min(x.shape[1], taps.shape[1])))


def hyena(w: dict, options: dict, x: torch.Tensor) -> torch.Tensor:
    z = convolve(x @ w["projections.weight"].t(), w["filter.short_filter_weight"][:, 0].flip(1))
    if options["interleave"]:
        z = torch.cat([z[..., part::3] for part in range(3)], -1)
    blocks = z.unflatten(-1, (options["num_attention_heads"] if options["column_split_hyena"] else 1, 3, -1))
    x2, x1, v = (blocks[..., part, :].flatten(2) for part in range(3))
    x2, x1 = (x1, x2) if options.get("hyena_flip_x1x2") else (x2, x1)
    if "filter.h" in w:
        taps = w["filter.h"][:, 0].repeat_interleave(x.shape[-1] // len(w["filter.h"]), 0)
        taps = taps if taps.shape[1] >= 128 else taps.flip(1)
    else:
        lags = torch.arange(x.shape[1], dtype=x.dtype)
        taps = (w["filter.residues"][..., None] * (w["filter.log_poles"] * lags).exp()).sum(1)  # (d, L)
    y = x2 * (convolve(x1 * v, taps) + w.get("filter.D", 0) * x1 * v)
    return y @ w["out_filter_dense.weight"].t() + w["out_filter_dense.bias"]


def attention(w: dict, options: dict, x: torch.Tensor) -> torch.Tensor:
    by_head, heads, length = options.get("column_split", True), options["num_attention_heads"], x.shape[1]
    qkv = (x @ w["inner_mha_cls.Wqkv.weight"].t()).unflatten(-1, (heads, 3, -1) if by_head else (3, heads, -1))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2 if by_head else -3))  # (b, H, L, width)
    factor = options["rotary_emb_scaling_factor"] if options.get("use_interpolated_rotary_pos_emb") else 1
    half = q.shape[-1] // 2
    rates = options["rotary_emb_base"] ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (torch.arange(length, dtype=x.dtype)[:, None] / factor * rates).repeat(1, 2)  # (L, width)
    q, k = (a * angles.cos() + torch.cat([-a[..., half:], a[..., :half]], -1) * angles.sin() for a in (q, k))
    scores = (q @ k.transpose(-1, -2) / (2 * half) ** 0.5).masked_fill(
        torch.ones(length, length).triu(1) > 0, -torch.inf
    )
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return y @ w["inner_mha_cls.out_proj.weight"].t() + w["inner_mha_cls.out_proj.bias"]
