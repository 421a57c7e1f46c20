"""Evo 2, StripedHyena 2: the names of its parameters and its options as fields of `TnnConfig`.

Checkpoints are `.pt` files beside which the released code has a YAML file of options. Of the public models, only the
size of the MLP and the rotary positions differ. (Brixi et al., "Genome modeling and design across all domains of life
with Evo 2", 2025; the code is vortex.) d channels, H heads, G filters, m taps.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tnn_programs.original.names import check_stated, check_values, layers_of

KINDS = {"hcs": "toeplitz", "hcm": "toeplitz", "hcl": "toeplitz", "attn": "full_attention"}
NAMES = (
    (r"^embedding_layer\.", "embed_tokens."),
    (r"^unembed\.", "lm_head."),
    (r"^norm\.scale$", "norm.weight"),
    (r"^blocks\.", "layers."),
    (r"\.pre_norm\.scale$", ".mixer_norm.weight"),
    (r"\.post_norm\.scale$", ".glu_norm.weight"),
    (r"\.mlp\.l1\.", ".glu.gate_proj."),
    (r"\.mlp\.l2\.", ".glu.up_proj."),
    (r"\.mlp\.l3\.", ".glu.down_proj."),
    (r"\.projections\.", ".mixer.in_proj."),
    (r"\.out_filter_dense\.", ".mixer.o_proj."),
    (r"\.filter\.short_filter_weight$", ".mixer.short.taps"),
    (r"\.filter\.h$", ".mixer.tno.taps"),
    (r"\.filter\.D$", ".mixer.skip.weight"),
    (r"\.filter\.(log_poles|residues)$", r".mixer.tno.\1"),
    (r"\.inner_mha_cls\.Wqkv\.", ".attention.qkv."),
    (r"\.inner_mha_cls\.out_proj\.", ".attention.o_proj."),
)
# Options and the only value that can be converted.
VALUES = {
    "short_filter_bias": False, "qkv_proj_bias": False, "mha_out_proj_bias": True, "hyena_out_proj_bias": True,
    "final_norm": True, "proj_groups": 1, "hyena_filter_groups": 1, "long_fir_threshold": None,
}  # fmt: skip
NEEDED = ("hidden_size", "num_attention_heads", *(f"{kind}_layer_idxs" for kind in KINDS))
LONG = 128  # taps from which a filter begins with lag 0; a shorter one ends with it

# The options of the public models of 7 billion parameters, as the package evo2 0.6.0 has them.
SIZE_7B = {
    "hidden_size": 4096, "num_attention_heads": 32, "evo2_style_activations": True, "interleave": True, "eps": 1e-6,
    "hcs_layer_idxs": [0, 4, 7, 11, 14, 18, 21, 25, 28], "hcm_layer_idxs": [1, 5, 8, 12, 15, 19, 22, 26, 29],
    "hcl_layer_idxs": [2, 6, 9, 13, 16, 20, 23, 27, 30], "attn_layer_idxs": [3, 10, 17, 24, 31],
    "rotary_emb_base": 10_000, "max_seqlen": 32_768, "hcs_filter_length": 7, "hcm_filter_length": 128,
    "inner_mlp_size": 11_008, "column_split_hyena": False,
}  # fmt: skip
INTERPOLATED = SIZE_7B | {"use_interpolated_rotary_pos_emb": True}
RELEASED = {
    "evo2": {},
    "evo2-7b-8k": SIZE_7B,
    "evo2-7b-262k": INTERPOLATED | {"rotary_emb_scaling_factor": 32, "max_seqlen": 262_144},
    "evo2-7b-1m": INTERPOLATED | {"rotary_emb_scaling_factor": 128, "max_seqlen": 1_048_576, "inner_mlp_size": 11_264},
}


def check(tensors: dict, options: dict):
    """Refuse, by a ValueError, options that are missing or have another value than the one that can be converted."""
    if missing := [name for name in NEEDED if name not in options]:
        raise ValueError(f"{missing[0]} must be given for a conversion, as in the YAML file of the model")
    check_values(options, VALUES)
    if options.get("use_fp8_input_projections") and options["hidden_size"] != 4096 and not options.get("allow_fp8"):
        raise ValueError(
            "use_fp8_input_projections must be off for a conversion, got True: the models of 1, 20 and 40 billion "
            "parameters were trained with FP8 projections, and their authors say that they need them. "
            "The option allow_fp8 converts them all the same."
        )
    if (numbers := sorted(sum((options[f"{kind}_layer_idxs"] for kind in KINDS), []))) != [*range(len(numbers))]:
        raise ValueError(f"The layers must have one kind each (hcs_layer_idxs and others), got {numbers}")


def prepare(tensors: dict[str, torch.Tensor], options: dict):
    """Bring projections and filters into their form here, in place."""
    vocabulary, width = tensors["embed_tokens.weight"].shape
    check_stated(options, {"vocab_size": vocabulary, "hidden_size": width})
    heads, rows = options["num_attention_heads"], thirds(options)
    for name in list(tensors):
        value = tensors[name]
        if name.endswith(("in_proj.weight", "short.taps")):
            if len(value) != 3 * width:
                raise ValueError(f"{name} must have 3 * hidden_size={3 * width} rows, got {len(value)}")
            value = value[rows]
            tensors[name] = value if value.dim() == 2 else value.flatten(1).flip(1)  # (3d, d), (3d, m)
        elif name.endswith("tno.taps"):
            tensors[name] = value.flatten(1) if value.shape[-1] >= LONG else value.flatten(1).flip(1)  # (G, m)
        elif name.endswith("tno.log_poles"):
            tensors[name] = value.flatten(1)  # (G, Q)
        elif name.endswith("attention.qkv.weight"):
            split = (heads, 3, -1) if options.get("column_split", True) else (1, 3, -1)
            parts = tensors.pop(name).unflatten(0, split).transpose(0, 1).flatten(1, 2)  # (3, d, d)
            tensors |= {name.replace("qkv", f"{part}_proj"): one for part, one in zip("qkv", parts, strict=True)}
        elif name.endswith("mixer_norm.weight") and int(name.split(".")[1]) in options["attn_layer_idxs"]:
            tensors[name.replace("mixer", "attention")] = tensors.pop(name)


def thirds(options: dict) -> torch.Tensor:
    """The rows of the released projections, `(3d,)`, in the order here: those of the gate, of keys, of values."""
    width, heads = options["hidden_size"], options["num_attention_heads"]
    rows = torch.arange(3 * width)
    if options.get("interleave"):
        rows = rows.view(-1, 3).t().flatten()
    rows = rows.view(heads if options.get("column_split_hyena", True) else 1, 3, -1).transpose(0, 1).flatten(1)
    return rows[[1, 0, 2] if options.get("hyena_flip_x1x2") else [0, 1, 2]].flatten()  # (3d,)


def sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields that follow from the weights, those of a layer in `per_layer_config`; ValueError without layers."""
    count = layers_of(tensors)
    if not count or "layers.0.glu.gate_proj.weight" not in tensors:
        raise ValueError(f"The checkpoint must hold the layers of StripedHyena 2, got {', '.join([*tensors][:4])}")
    (vocabulary, width), layers, modes, taps = tensors["embed_tokens.weight"].shape, {}, 1, 3
    for index in range(count):
        mixer = f"layers.{index}.mixer"
        poles, filters = (tensors.get(f"{mixer}.tno.{name}") for name in ("log_poles", "taps"))
        taps = tensors[f"{mixer}.short.taps"].shape[1] if f"{mixer}.short.taps" in tensors else taps
        layers[index] = own = {}
        if poles is not None:
            modes = poles.shape[1]
            own |= {"num_filter_groups": len(poles)} if len(poles) < width else {}
        elif filters is not None:
            own |= {"tno_type": "explicit", "explicit_length": filters.shape[1], "num_filter_groups": len(filters)}
        if poles is not None or (filters is not None and filters.shape[1] >= LONG):
            own["hyena_skip"] = True
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "gtu_dim": width,
        "num_hidden_layers": count,
        "intermediate_size": len(tensors["layers.0.glu.gate_proj.weight"]),
        "num_modes": modes,
        "short_conv_kernel": taps,
        "per_layer_config": layers,
    }


def check_sizes(options: dict, kinds: dict[int, str], found: dict):
    """Refuse weights of other layers or sizes than the options say. `kinds` are those of the layers, by number."""
    if len(kinds) != (count := found["num_hidden_layers"]):
        raise ValueError(f"The checkpoint must have {len(kinds)} layers, as its options, got {count}")
    check_stated(options, {"inner_mlp_size": found["intermediate_size"]})
    for index, kind in kinds.items():
        own, long = found["per_layer_config"][index], kind == "hcl"
        if kind != "attn" and ("tno_type" in own) == long:
            held = "log_poles" if long else "h"
            raise ValueError(f"The checkpoint must hold blocks.{index}.filter.{held} (option {kind}_layer_idxs)")
        sizes = {"state_size": found["num_modes"]} if long else {f"{kind}_filter_length": own.get("explicit_length")}
        check_stated(options, sizes | {f"{kind}_filter_groups": own.get("num_filter_groups", found["hidden_size"])})


def fields(options: dict, found: dict) -> dict:
    """The other fields. Only the first GLU has an activation in models of this style."""
    kinds = {index: kind for kind in KINDS for index in options[f"{kind}_layer_idxs"]}
    check_sizes(options, kinds, found)
    act = options.get("mlp_activation", "gelu")
    if options.get("evo2_style_activations"):
        found["per_layer_config"][0]["hidden_act"], act = act, "linear"
    rotary = {"rope_type": "default", "rope_theta": float(options.get("rotary_emb_base", 1_000_000))}
    if options.get("use_interpolated_rotary_pos_emb"):
        rotary |= {"rope_type": "linear", "factor": float(options["rotary_emb_scaling_factor"])}
    return {
        "layer_types": [KINDS[kinds[index]] for index in range(len(kinds))],
        "num_attention_heads": options["num_attention_heads"] if options["attn_layer_idxs"] else None,
        "rope_parameters": rotary if options["attn_layer_idxs"] else None,
        "tno_type": "exponential",
        "toeplitz_mixer": "hyena",
        "gtu_expansion": 1,
        "hidden_act": act,
        "norm_type": "rmsnorm",
        "final_norm_type": "rmsnorm",
        "rms_norm_eps": float(options.get("eps", 1e-6)),
        "output_biases_only": True,
        "scale_embedding": False,
        "max_position_embeddings": options.get("max_seqlen", 8192),
        "hidden_dropout_prob": 0.0,
        "initializer": "normal",
        "bos_token_id": None,
        "pad_token_id": 1,
        "eos_token_id": 0,
    }


def byte_tokenizer(length: int | None = None, size: int = 512) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each byte, whose value is the id. It pads on the left.

    The ids 0 and 1 are the end of text and padding, so bytes of these values have no token. The ids from 256 on have
    no bytes.
    """
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte > 1}
    vocabulary |= {"<|eos|>": 0, "<|pad|>": 1}
    vocabulary |= {f"<|unused_{number}|>": number for number in range(256, size)}
    tokens = Tokenizer(models.BPE(vocabulary, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    options = {"padding_side": "left", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "model_max_length": length}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, clean_up_tokenization_spaces=False, **options)
