"""The models of the released RTF code in their own backbones: names, layouts and options, and their counterparts here.

    rtf-*        S4's stack of blocks, of the Long Range Arena: `encoder.`, `model.layers.`, `decoder.`
    hyena_rtf    the language model of safari with RTF as Hyena's filter: `backbone.layers.`, `lm_head.`

Lightning puts `model.` before the names of a language model. The released code has no other backbone for language.
d channels, s sides (2 if bidirectional), A denominators of N coefficients, m taps of the short filter.
"""

import re

import torch

from modeling_tnn.norms import NORM_TYPES

S4_NAMES = (
    (r"^model\.layers\.(\d+)\.layer\.layer\.(ab|h_0|scalar)$", r"layers.\1.mixer.tno.\2"),
    (r"^model\.layers\.(\d+)\.layer\.output_linear\.0\.", r"layers.\1.mixer.o_proj."),
    (r"^model\.layers\.(\d+)\.norm\.norm\.", r"layers.\1.mixer_norm."),
    (r"^model\.norm\.norm\.", "norm."),
    (r"^encoder\.\d+\.(weight|bias)$", r"embed_tokens.\1"),
    (r"^decoder\.\d+\.(output_transform|retrieval\.classifier\.2)\.", "classifier.out_proj."),
    (r"^decoder\.\d+\.retrieval\.classifier\.0\.", "classifier.dense."),
    (r"\.h_0$", ".direct"),
    (r"\.scalar$", ".slack"),
)
HYENA_NAMES = (
    (r"^(model\.)?backbone\.embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^(model\.)?backbone\.ln_f\.", "norm."),
    (r"^(model\.)?backbone\.layers\.", "layers."),
    (r"^(model\.)?lm_head\.", "lm_head."),
    (r"\.mixer\.filter_fn\.", ".mixer.tno."),
    (r"\.mixer\.short_filter\.weight$", ".mixer.short.taps"),
    (r"\.mixer\.short_filter\.", ".mixer.short."),
    (r"\.mixer\.mimo_proj\.", ".mixer.low_rank."),
    (r"\.mixer\.out_proj\.", ".mixer.o_proj."),
    (r"\.mixer\.(in_proj|norm)\.", r".mixer.\1."),
    (r"\.mlp\.fc1\.", ".glu.up_proj."),
    (r"\.mlp\.fc2\.", ".glu.down_proj."),
    (r"\.norm1\.", ".mixer_norm."),
    (r"\.norm2\.", ".glu_norm."),
    (r"\.h_0$", ".direct"),
    (r"\.scalar$", ".slack"),
)
# Options of these backbones and the only value that can be converted.
S4_VALUES = {
    "bottleneck": None,
    "custom_layer": "rtf",
    "final_act": "glu",
    "gate": None,
    "mult_act": None,
    "nli": True,
    "postact": None,
    "residual": "R",
    "weight_norm": False,
}
HYENA_VALUES = {
    "attn_layer_idx": None,
    "filter_cls": "rtf",
    "inner_factor": 1,
    "max_position_embeddings": 0,
    "num_blocks": 1,
    "num_heads": 1,
    "order": 2,
    "outer_mixing": False,
    "post_order_ffn": False,
}
# Tensors that only exist with an option that has no counterpart here.
REFUSED = {
    r"\.(reverse_layer|bidirectional_linear)\.": "bidirectional of the model (that of the layer is converted)",
    r"\.(input_gate|output_gate)\.": "gate",
    r"\.input_linear\.": "bottleneck",
    r"\.layer\.layer\.(kernel|D$)": "custom_layer other than 'rtf'",
    r"\.(weight_g|weight_v)$": "weight_norm",
    r"\.position_embeddings\.": "max_position_embeddings",
    r"\.(Wqkv|inner_attn)\.": "attn_layer_idx",
    r"\.filter_fn\.(implicit_filter|pos_emb|modulation)\.": "filter_cls other than 'rtf'",
    r"\.ord_proj_w$": "post_order_ffn",
}
POOLINGS = {"pool": "mean", "last": "last"}
# Mean and standard deviation with which the released code normalises grey values v / 255, by data set.
PICTURES = {"cifar": (122.6 / 255, 61 / 255), "pathfinder": (0.5, 0.5)}
FIRST = "layers.0.mixer."
END_OF_TEXT = 50256  # of the tokenizer of GPT-2, with which the released language model was trained


def refuse_other_parts(tensors: dict[str, torch.Tensor]):
    """Refuse tensors, in official names, of parts that this package does not have.

    Raises:
        ValueError: there is one; the message names it and the option behind it.
    """
    for name in tensors:
        if (option := next((option for part, option in REFUSED.items() if re.search(part, name)), None)) is not None:
            raise ValueError(f"The option {option} must be off for a conversion, got {name}")


def check_stated(options: dict, measured: dict):
    """Compare the options with what the weights say.

    Raises:
        ValueError: they differ.
    """
    for name, value in measured.items():
        if options.get(name) is not None and options[name] != value:
            raise ValueError(f"{name} must be {value!r}, as in the weights of the checkpoint, got {options[name]!r}")


def rational_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields that follow from the first RTF filter and from the embedding.

    Raises:
        ValueError: there is no such filter, or it does not have one number h_0 for each channel.
    """
    ab, direct = (tensors.get(f"{FIRST}tno.{name}") for name in ("ab", "direct"))
    if ab is None or direct is None:
        got = ", ".join([*tensors][:8])
        raise ValueError(f"The checkpoint must hold filters of RTF, ab and h_0 in each layer, got {got}")
    (vocabulary, width), count = tensors["embed_tokens.weight"].shape, len(direct)
    if count not in (width, 2 * width) or not 0 < len(ab) - count <= count:
        raise ValueError(f"h_0 must have {width} or {2 * width} entries, and ab more rows, got {count} and {len(ab)}")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
        "gtu_dim": width,
        "causal": count == width,
        "rtf_state_size": ab.shape[1],
        "rtf_num_denominators": (len(ab) - count) * width // count,
        "rtf_constraint": "l1_montel" if f"{FIRST}tno.slack" in tensors else None,
    }


def s4_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields of `TnnConfig` that follow from a stack of S4's blocks, by their names here."""
    batch = "layers.0.mixer_norm.running_mean" in tensors
    return rational_sizes(tensors) | {
        "norm_type": "batchnorm" if batch else "layernorm",
        "norm_position": "pre" if "norm.weight" in tensors else "post",
        "classifier_act": "relu" if "classifier.dense.weight" in tensors else None,
    }


def hyena_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields of `TnnConfig` that follow from the released Hyena language model, by their names here."""
    found = rational_sizes(tensors)
    rows = {name: len(value) for name, value in tensors.items() if name.startswith("layers.0.")}
    taps = tensors.get(f"{FIRST}short.taps")
    return found | {
        "short_conv_kernel": 3 if taps is None else taps.shape[-1],
        "hyena_rank": rows.get(f"{FIRST}low_rank.weight"),
        "hyena_norm": f"{FIRST}norm.weight" in tensors,
        "intermediate_size": rows.get("layers.0.glu.up_proj.weight"),
    }


def rational_measured(found: dict) -> dict:
    """The options of `RTF` that follow from its weights."""
    return {
        "d_model": found["hidden_size"],
        "state_size": found["rtf_state_size"],
        "num_a": found["rtf_num_denominators"],
        "bidirectional": not found["causal"],
        "constraint": found["rtf_constraint"] or "no",
    }


def s4_fields(options: dict, found: dict) -> dict:
    """The fields from the options of S4's stack and of `RTF` in it."""
    check_stated(
        options,
        rational_measured(found)
        | {
            "n_layers": found["num_hidden_layers"],
            "prenorm": found["norm_position"] == "pre",
            "norm": "batch" if found["norm_type"] == "batchnorm" else "layer",
        },
    )
    mode = options.get("mode", "pool")
    if mode not in POOLINGS:
        raise ValueError(f"mode must be one of {', '.join(POOLINGS)} for a conversion, got {mode!r}")
    return {
        "tno_type": "rtf",
        "toeplitz_mixer": "s4",
        "gtu_expansion": 1,
        "use_glu": False,
        "hidden_act": options.get("activation", "gelu") or "linear",
        "scale_embedding": False,
        "max_position_embeddings": options["trunc_len"],
        "hidden_dropout_prob": options.get("dropout", 0.0),
        "classifier_dropout": 0.0,
        "classifier_pooling": POOLINGS[mode],
    }


def hyena_fields(options: dict, found: dict) -> dict:
    """The fields from the options of the language model, of Hyena and of `RTF` in it."""
    check_stated(
        options,
        rational_measured(found)
        | {
            "n_layer": found["num_hidden_layers"],
            "d_inner": found["intermediate_size"],
            "short_filter_order": found["short_conv_kernel"],
        },
    )
    special = END_OF_TEXT if found["vocab_size"] > END_OF_TEXT else None
    return {
        "tno_type": "rtf",
        "toeplitz_mixer": "hyena",
        "gtu_expansion": 1,
        "hidden_act": "gelu",
        "mlp_act": "gelu_pytorch_tanh",
        "norm_type": "layernorm",
        "norm_position": "pre",
        "layer_norm_eps": options.get("layer_norm_epsilon", 1e-5),
        "scale_embedding": False,
        "max_position_embeddings": options["trunc_len"],
        "hidden_dropout_prob": options.get("resid_dropout", 0.0),
        "initializer": "normal",
        "bos_token_id": special,
        "pad_token_id": special,
        "eos_token_id": special,
    }


def prepare_s4(tensors: dict[str, torch.Tensor], options: dict):
    """Bring the encoder of pictures, the head of Retrieval and the norms into their form here, in place.

    A picture is a row of grey values v in 0 .. 255. The released encoder is a linear map of the normalised value, so
    it is a table of 256 embeddings: E[v] = W (v / 255 - mean) / std + b.

    Raises:
        ValueError: the encoder is linear, and the data set has no pictures of one channel.
    """
    if (bias := tensors.pop("embed_tokens.bias", None)) is not None:
        weight, dataset = tensors["embed_tokens.weight"], options.get("dataset")  # (d, 1)
        if dataset not in PICTURES or weight.shape[1] != 1:
            raise ValueError(
                f"dataset must be one of {', '.join(PICTURES)}, with grey pictures, for a linear encoder, got "
                f"{dataset!r} and {weight.shape[1]} channels"
            )
        mean, deviation = PICTURES[dataset]
        values = (torch.arange(256, dtype=torch.float64)[:, None] / 255 - mean) / deviation  # (256, 1)
        tensors["embed_tokens.weight"] = (values * weight.double().t() + bias.double()).to(weight.dtype)
    if (dense := tensors.get("classifier.dense.weight")) is not None:  # of [a, b, a - b, a * b]
        a, b, difference, product = dense.chunk(4, dim=1)
        tensors["classifier.dense.weight"] = torch.cat([a, b, product, difference], dim=1)
    for name in [name for name in tensors if name.endswith("mixer_norm.weight")]:
        stem, value = name.removesuffix("mixer_norm.weight"), tensors[name]
        kind = "batchnorm" if f"{stem}mixer_norm.running_mean" in tensors else "layernorm"
        # A block without a GLU still has the norm before it, which nothing uses.
        unused = NORM_TYPES[kind](len(value)).to(value.dtype).state_dict()
        tensors |= {f"{stem}glu_norm.{part}": default for part, default in unused.items()}


def prepare_hyena(tensors: dict[str, torch.Tensor], options: dict):
    """Bring the filters into their form here, in place.

    The released short filter correlates, `(3D, 1, m)` from the highest lag on. h_0 enters the released long filter
    twice: in its kernel, and as the skip weight beside it.
    """
    for name in [name for name in tensors if name.endswith("short.taps")]:
        tensors[name] = tensors[name].flatten(1).flip(1)  # (3D, m)
    for name in [name for name in tensors if name.endswith("tno.direct")]:
        tensors[name] = 2 * tensors[name]
