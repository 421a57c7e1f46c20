"""Options of the released implementations as fields of `TnnConfig`, and the options that have no counterpart here.

An architecture is a name under which the released code registers its defaults, or the name of a stand-alone layer.
Sizes are read from the weights. Options for computations that this package does not have are refused.
d channels, s sides (2 if bidirectional), A denominators of N coefficients, m taps of the short filter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from modeling_tnn.data.dna import dna_tokenizer
from modeling_tnn.modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.tools.sequence_pairs import TnnForSequencePairClassification
from tnn_programs.original import evo2, hyenadna
from tnn_programs.original.names import (
    HYENA_NAMES,
    RENAMED,
    S4_NAMES,
    check_stated,
    check_values,
    layers_of,
    refuse_other_parts,
)

HEADS = {
    "base": TnnModel,
    "causal-lm": TnnForCausalLM,
    "masked-lm": TnnForMaskedLM,
    "sequence-classification": TnnForSequenceClassification,
    "sequence-pair-classification": TnnForSequencePairClassification,
}
# Options of each backbone and the only value that can be converted, which is the default in the released code.
TNN_VALUES = {
    "act_type": "none", "adaptive_input": False, "bias": True, "character_embeddings": False, "fina_act": "None",
    "glu_type": 1, "gtu_type": 2, "no_decoder_final_norm": False, "no_token_positional_embeddings": True,
    "normalize": False, "par_type": 1, "pooler_activation_fn": "tanh", "quant_noise_pq": 0, "resi_param": False,
    "spectral_norm_classification_head": False, "strottle": False, "tno_spike": False,
}  # fmt: skip
S4_VALUES = {
    "bottleneck": None, "custom_layer": "rtf", "final_act": "glu", "gate": None, "mult_act": None, "nli": True,
    "postact": None, "residual": "R", "weight_norm": False,
}  # fmt: skip
HYENA_VALUES = {
    "attn_layer_idx": None, "filter_cls": "rtf", "inner_factor": 1, "max_position_embeddings": 0, "num_blocks": 1,
    "num_heads": 1, "order": 2, "outer_mixing": False, "post_order_ffn": False,
}  # fmt: skip
# The released FD and SKI operators accept these options and do not use them.
UNUSED_BY_FD_AND_SKI = ("act_type", "par_type", "normalize")
OPERATORS = {"tno": "rpe", "tno_fd": "fd", "skitno_inv_time": "ski"}
POOLINGS = {"pool": "mean", "last": "last"}
# Mean and standard deviation with which the released code normalises grey values v / 255, by data set.
PICTURES = {"cifar": (122.6 / 255, 61 / 255), "pathfinder": (0.5, 0.5)}
FIRST = "layers.0.mixer."
END_OF_TEXT = 50256  # of the tokenizer of GPT-2, with which the released language model was trained
# Field of `TnnConfig` -> the tensor and its axis that have this size.
TNN_SIZES = {
    "vocab_size": ("embed_tokens.weight", 0),
    "hidden_size": ("embed_tokens.weight", 1),
    "gtu_dim": (f"{FIRST}u_proj.weight", 0),
    "intermediate_size": ("layers.0.glu.gate_proj.weight", 0),
    "rpe_dim": (f"{FIRST}tno.rpe.in_proj.weight", 0),
    "ski_rank": (f"{FIRST}tno.alphas", 1),
    "ski_filter_size": (f"{FIRST}tno.filter", 1),
}
# Field of `TnnConfig` -> the option of fairseq-evo and ski-tnn, and its default.
FAIRSEQ_FIELDS = {
    "gtu_norm": ("use_norm", False),
    "hidden_act": ("act_fun", "silu"),
    "rpe_act": ("rpe_act", "relu"),
    "fd_act": ("rpe_act", "relu"),
    "rpe_residual": ("residual", False),
    "norm_type": ("norm_type", "layernorm"),
    "embedding_norm": ("layernorm_embedding", False),
    "learnable_decay": ("use_multi_decay", False),
    "hidden_dropout_prob": ("dropout", 0.1),
    "classifier_dropout": ("pooler_dropout", None),
}
# Fields of all models of the released RTF code, of S4's stack of blocks, and of the language model.
RTF_FIELDS = {"tno_type": "rtf", "gtu_expansion": 1, "scale_embedding": False}
S4_FIELDS = RTF_FIELDS | {"toeplitz_mixer": "s4", "use_glu": False, "classifier_dropout": 0.0}
HYENA_FIELDS = RTF_FIELDS | {
    "toeplitz_mixer": "hyena",
    "hidden_act": "gelu",
    "mlp_act": "gelu_pytorch_tanh",
    "norm_type": "layernorm",
    "norm_position": "pre",
    "initializer": "normal",
}


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The fields of `TnnConfig` that follow from the shapes of `tensors`, by their names here."""
    found = {size: tensors[name].shape[axis] for size, (name, axis) in TNN_SIZES.items() if name in tensors}
    if "gtu_dim" not in found:
        raise ValueError(f"The checkpoint must hold layers of a TNN, got nothing for {FIRST}u_proj.weight")
    if "rpe_dim" in found:
        hidden = f"{FIRST}tno.rpe.layers."
        found["rpe_layers"] = len({name.removeprefix(hidden).split(".")[0] for name in tensors if hidden in name})
    return found | {"num_hidden_layers": layers_of(tensors)}


def check_tnn(tensors: dict, options: dict):
    """Refuse options of a TNN for computations that this package does not have."""
    check_values(options, TNN_VALUES, UNUSED_BY_FD_AND_SKI if operator_of(options) != "rpe" else ())
    inner = next((name for name in ("gtu_act", "act_fun") if name in options), "act_fun")
    first, second = options.get(inner, "silu"), options.get("glu_act", "silu")
    if first != second:
        raise ValueError(f"glu_act must be {inner}={first!r} for a conversion, got {second!r}")


def check_backbone(tensors: dict, options: dict, supported: dict):
    """Refuse options and tensors, in official names, of other backbones than this package has."""
    refuse_other_parts(tensors)
    check_values(options, supported)


def operator_of(options: dict) -> str:
    """The `tno_type` here. Older files of ski-tnn have a flag `tno_fd` instead of the official `tno_type`."""
    official = options.get("tno_type") or ("tno_fd" if options.get("tno_fd") else "tno")
    if official not in OPERATORS:
        raise ValueError(f"tno_type must be one of {', '.join(OPERATORS)} for a conversion, got {official!r}")
    return OPERATORS[official]


def fairseq_fields(options: dict, found: dict, side: str) -> dict:
    """The fields from the options of fairseq-evo and ski-tnn. `side` is `decoder` or `encoder`."""
    causal = side == "decoder"
    if not causal and options.get("activation_fn", "gelu") != "gelu":
        raise ValueError(f"activation_fn must be 'gelu' for a conversion, got {options['activation_fn']!r}")
    lengths = (options.get(name) for name in ("tokens_per_sample", "max_target_positions", "max_positions"))
    length = next(filter(None, lengths), 512)
    fields = {name: options.get(option, default) for name, (option, default) in FAIRSEQ_FIELDS.items()}
    special = ("bos_token_id", "pad_token_id", "eos_token_id")
    fields |= {name: options[name] for name in special if name in options}
    return fields | {
        "causal": options.get("causal", causal),
        "tno_type": operator_of(options),
        "gtu_expansion": expansion(found),
        "norm_position": "pre" if options.get(f"{side}_normalize_before", False) else "post",
        "scale_embedding": not options.get("no_scale_embedding", False),
        "max_position_embeddings": length,
        "initializer": "torch" if causal else "normal",
    }


def expansion(found: dict) -> int | float:
    """The `gtu_expansion` that gives the width of the weights."""
    width, ratio = found["hidden_size"], found["gtu_dim"] / found["hidden_size"]
    if ratio.is_integer():
        return int(ratio)
    return ratio if int(ratio * width) == found["gtu_dim"] else math.nextafter(ratio, math.inf)


def standalone_fields(options: dict, found: dict) -> dict:
    """The fields from the arguments of `TnnLayer` of tnn-pytorch. Those of the model around it have names of here."""
    own = {
        "causal": options.get("causal", False),
        "hidden_act": options.get("gtu_act", "silu"),
        "norm_type": options.get("norm_type", "simplermsnorm"),
        "norm_position": "pre" if options.get("prenorm", True) else "res_post",
    }
    around = {"scale_embedding": False, "embedding_norm": False, "hidden_dropout_prob": 0.0}
    around |= {name: value for name, value in options.items() if name in (*around, "max_position_embeddings")}
    return fairseq_fields(options, found, "decoder") | own | around


def rational_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields that follow from the first RTF filter and from the embedding."""
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
        "num_hidden_layers": layers_of(tensors),
        "gtu_dim": width,
        "causal": count == width,
        "rtf_state_size": ab.shape[1],
        "rtf_num_denominators": (len(ab) - count) * width // count,
        "rtf_constraint": "l1_montel" if f"{FIRST}tno.slack" in tensors else None,
    }


def s4_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields of `TnnConfig` that follow from a stack of S4's blocks, by their names here."""
    return rational_sizes(tensors) | {
        "norm_type": "batchnorm" if "layers.0.mixer_norm.running_mean" in tensors else "layernorm",
        "norm_position": "pre" if "norm.weight" in tensors else "post",
        "classifier_act": "relu" if "classifier.dense.weight" in tensors else None,
    }


def hyena_sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields of `TnnConfig` that follow from the released Hyena language model, by their names here."""
    rows = {name: len(value) for name, value in tensors.items() if name.startswith("layers.0.")}
    taps = tensors.get(f"{FIRST}short.taps")
    return rational_sizes(tensors) | {
        "short_conv_kernel": 3 if taps is None else taps.shape[-1],
        "hyena_rank": rows.get(f"{FIRST}low_rank.weight"),
        "hyena_norm": f"{FIRST}norm.weight" in tensors,
        "intermediate_size": rows.get("layers.0.glu.up_proj.weight"),
    }


def s4_fields(options: dict, found: dict) -> dict:
    """The fields from the options of S4's stack and of `RTF` in it."""
    norm = "batch" if found["norm_type"] == "batchnorm" else "layer"
    stated = {"prenorm": found["norm_position"] == "pre", "norm": norm, "constraint": found["rtf_constraint"] or "no"}
    check_stated(options, stated)
    mode = options.get("mode", "pool")
    if mode not in POOLINGS:
        raise ValueError(f"mode must be one of {', '.join(POOLINGS)} for a conversion, got {mode!r}")
    return S4_FIELDS | {
        "hidden_act": options.get("activation", "gelu") or "linear",
        "max_position_embeddings": options["trunc_len"],
        "hidden_dropout_prob": options.get("dropout", 0.0),
        "classifier_pooling": POOLINGS[mode],
    }


def hyena_fields(options: dict, found: dict) -> dict:
    """The fields from the options of the language model, of Hyena and of `RTF` in it."""
    check_stated(options, {"constraint": found["rtf_constraint"] or "no"})
    special = END_OF_TEXT if found["vocab_size"] > END_OF_TEXT else None
    own = HYENA_FIELDS | dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id"), special)
    return own | {
        "layer_norm_eps": options.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": options["trunc_len"],
        "hidden_dropout_prob": options.get("resid_dropout", 0.0),
    }


def prepare_s4(tensors: dict[str, torch.Tensor], options: dict):
    """Bring the encoder of pictures, the head of Retrieval and the norms into their form here, in place.

    A picture is a row of grey values v in 0 .. 255. The released encoder is a linear map of the normalised value, so
    it is a table of 256 embeddings: E[v] = W (v / 255 - mean) / std + b.
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
    for name in tensors:
        if name.endswith("short.taps"):
            tensors[name] = tensors[name].flatten(1).flip(1)  # (3D, m)
        elif name.endswith("tno.direct"):
            tensors[name] = 2 * tensors[name]


@dataclass(frozen=True)
class Architecture:
    """A kind of checkpoint."""

    fields: Callable[[dict, dict], dict]  # of the configuration, from the options and the sizes of the weights
    head: str  # one of `HEADS`
    options: dict = field(default_factory=dict)  # the registered defaults
    names: tuple[tuple[str, str], ...] = tuple(RENAMED)  # patterns of official names, and our names
    check: Callable[[dict, dict], None] = check_tnn  # refuses tensors, in official names, and options
    prepare: Callable[[dict, dict], None] = lambda tensors, options: None  # of tensors in our names, in place
    sizes: Callable[[dict], dict] = sizes  # the fields that follow from the weights
    tokenizer: Callable | None = None  # makes that of a number of positions, if the checkpoint fixes it


def s4_model(head: str = "sequence-classification", **options) -> Architecture:
    """A model of the Long Range Arena of the released RTF code, with the options of its experiment."""
    # The norms of all experiments. Weights without their buffers would pass for another norm.
    options, check = {"norm": "batch", "prenorm": True} | options, partial(check_backbone, supported=S4_VALUES)
    return Architecture(s4_fields, head, options, S4_NAMES, check, prepare_s4, s4_sizes)


def dna_model(module, options: dict, check: Callable, tokenizer: Callable) -> Architecture:
    """A language model of DNA, which a module of this folder describes."""
    functions = (module.prepare, module.sizes, tokenizer)
    return Architecture(module.fields, "causal-lm", options, module.NAMES, check, *functions)


PUBLISHED = {
    "expand_ratio": 3, "act_fun": "silu", "glu_act": "silu", "use_norm": False, "norm_type": "simplermsnorm",
    "residual": False,
}  # fmt: skip
CAUSAL = PUBLISHED | {"causal": True, "decoder_normalize_before": True}
MASKED = PUBLISHED | {"encoder_normalize_before": False, "no_scale_embedding": True, "layernorm_embedding": True}
DECAY = {"use_decay": True, "gamma": 0.99}
HYENA = {"trunc_len": 1024, "constraint": "l1_montel"}
check_hyena = partial(check_backbone, supported=HYENA_VALUES)
decoder = partial(Architecture, partial(fairseq_fields, side="decoder"), "causal-lm")
encoder = partial(Architecture, partial(fairseq_fields, side="encoder"), "masked-lm")
ARCHITECTURES = {
    "tnn_v2_decay_99_pre": decoder(CAUSAL | DECAY),
    "tnn_v2_decay_99_pre_l6": decoder(CAUSAL | DECAY),
    "tnn_v2_decay_99_pre_usenorm": decoder(CAUSAL | DECAY | {"use_norm": True}),
    "tnn_v2_decay_99_post": decoder(CAUSAL | DECAY | {"decoder_normalize_before": False}),
    "tnn_v2_no_decay": decoder(CAUSAL | {"use_decay": False}),
    "roberta_tnn_v2_decay_99": encoder(MASKED | DECAY),
    "laxtnn_alm_tno_fd": decoder(CAUSAL | {"tno_type": "tno_fd"}),
    "laxtnn_alm_tno_fd_3lyrs": decoder(CAUSAL | {"tno_type": "tno_fd"}),
    "laxtnn_blm_tno_fd_3lyrs": encoder(MASKED | {"tno_type": "tno_fd"}),
    "ski_blm_inv_time": encoder(MASKED | DECAY | {"tno_type": "skitno_inv_time"}),
    "tnn_pytorch": Architecture(standalone_fields, "base"),
    "rtf-listops": s4_model(trunc_len=2048),
    "rtf-imdb": s4_model(trunc_len=4096),
    "rtf-aan": s4_model("sequence-pair-classification", trunc_len=4000),
    "rtf-cifar": s4_model(trunc_len=1024, dataset="cifar"),
    "rtf-pathfinder": s4_model(trunc_len=1024, dataset="pathfinder"),
    "rtf-pathx": s4_model(trunc_len=16384, dataset="pathfinder"),
    "hyena_rtf": Architecture(hyena_fields, "causal-lm", HYENA, HYENA_NAMES, check_hyena, prepare_hyena, hyena_sizes),
    "hyenadna": dna_model(hyenadna, {}, lambda _, options: check_values(options, hyenadna.VALUES), dna_tokenizer),
    **{name: dna_model(evo2, given, evo2.check, evo2.byte_tokenizer) for name, given in evo2.RELEASED.items()},
}
