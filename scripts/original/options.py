"""Options of the released implementations as fields of `TnnConfig`, and the options that have no counterpart here.

An architecture is a name under which the released code registers its defaults, or the name of a stand-alone layer.
Sizes are read from the weights; options that state them are only compared. Options for computations that this package
does not have are refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification
from tnn_scripts.original.backbones import (
    HYENA_NAMES,
    HYENA_VALUES,
    S4_NAMES,
    S4_VALUES,
    hyena_fields,
    hyena_sizes,
    prepare_hyena,
    prepare_s4,
    refuse_other_parts,
    s4_fields,
    s4_sizes,
)
from tnn_scripts.original.names import RENAMED

HEADS = {
    "base": TnnModel,
    "causal-lm": TnnForCausalLM,
    "masked-lm": TnnForMaskedLM,
    "sequence-classification": TnnForSequenceClassification,
    "sequence-pair-classification": TnnForSequencePairClassification,
}
# Options and the only value that can be converted, which is the default in the released code.
SUPPORTED_VALUE = {
    "act_type": "none",
    "adaptive_input": False,
    "bias": True,
    "character_embeddings": False,
    "fina_act": "None",
    "glu_type": 1,
    "gtu_type": 2,
    "no_decoder_final_norm": False,
    "no_token_positional_embeddings": True,
    "normalize": False,
    "par_type": 1,
    "pooler_activation_fn": "tanh",
    "quant_noise_pq": 0,
    "resi_param": False,
    "spectral_norm_classification_head": False,
    "strottle": False,
    "tno_spike": False,
}
# The released FD and SKI operators accept these options and do not use them.
UNUSED_BY_FD_AND_SKI = ("act_type", "par_type", "normalize")
OPERATORS = {"tno": "rpe", "tno_fd": "fd", "skitno_inv_time": "ski"}
DEFAULT_LENGTH = 512


def sizes(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The fields of `TnnConfig` that follow from the shapes of `tensors`, by their names here.

    Raises:
        ValueError: there are no layers of a TNN.
    """
    layers = {int(name.split("layers.", 1)[1].split(".", 1)[0]) for name in tensors if "layers." in name}
    found = {"num_hidden_layers": max(layers, default=-1) + 1}
    dimensions = {
        "vocab_size": ("embed_tokens.weight", 0),
        "hidden_size": ("embed_tokens.weight", 1),
        "gtu_dim": ("layers.0.mixer.u_proj.weight", 0),
        "intermediate_size": ("layers.0.glu.gate_proj.weight", 0),
        "rpe_dim": ("layers.0.mixer.tno.rpe.in_proj.weight", 0),
        "ski_rank": ("layers.0.mixer.tno.alphas", 1),
        "ski_filter_size": ("layers.0.mixer.tno.filter", 1),
        "rtf_state_size": ("layers.0.mixer.tno.ab", 1),
    }
    for size, (suffix, axis) in dimensions.items():
        if (value := next((v for n, v in tensors.items() if n.endswith(suffix)), None)) is not None:
            found[size] = value.shape[axis]
    if "rpe_dim" in found:
        hidden = "layers.0.mixer.tno.rpe.layers."
        found["rpe_layers"] = len({n.split(hidden)[1].split(".")[0] for n in tensors if hidden in n})
    if "gtu_dim" not in found:
        raise ValueError("The checkpoint must hold layers of a TNN, got nothing for layers.0.mixer.u_proj.weight")
    return found


def check_values(options: dict, supported: dict, unused: tuple[str, ...] = ()):
    """Refuse options that have another value than the `supported` one.

    Raises:
        ValueError: there is such an option; the message names it.
    """
    for name, allowed in supported.items():
        if name in options and name not in unused and options[name] != allowed:
            raise ValueError(f"{name} must be {allowed!r} for a conversion, got {options[name]!r}")


def check_supported(options: dict):
    """Refuse options of a TNN for computations that this package does not have.

    Raises:
        ValueError: there is such an option; the message names it.
    """
    check_values(options, SUPPORTED_VALUE, UNUSED_BY_FD_AND_SKI if operator_of(options) != "rpe" else ())
    inner = next((name for name in ("gtu_act", "act_fun") if name in options), "act_fun")
    first, second = options.get(inner, "silu"), options.get("glu_act", "silu")
    if first != second:
        raise ValueError(f"glu_act must be {inner}={first!r} for a conversion, got {second!r}")


def operator_of(options: dict) -> str:
    """The `tno_type` here. Older files of ski-tnn have a flag `tno_fd` instead of the official `tno_type`."""
    official = options.get("tno_type") or ("tno_fd" if options.get("tno_fd") else "tno")
    if official not in OPERATORS:
        raise ValueError(f"tno_type must be one of {', '.join(OPERATORS)} for a conversion, got {official!r}")
    return OPERATORS[official]


def check_sizes(stated: dict, found: dict):
    """Compare the sizes that options state with those of the weights.

    Raises:
        ValueError: they differ.
    """
    for name, (option, value) in stated.items():
        if value is not None and value != -1 and name in found and found[name] != value:
            raise ValueError(f"{option} must be {found[name]}, as in the weights of the checkpoint, got {value}")


def fairseq_sizes(options: dict, width: int, side: str) -> dict[str, tuple[str, int | None]]:
    """The sizes that options of fairseq-evo and ski-tnn state, each with the name of its option."""
    ratio, filter_size = options.get("expand_ratio", 3), options.get("nk")
    return {
        "vocab_size": ("vocab_size", options.get("vocab_size")),
        "hidden_size": (f"{side}_embed_dim", options.get(f"{side}_embed_dim")),
        "num_hidden_layers": (f"{side}_layers", options.get(f"{side}_layers")),
        "gtu_dim": ("int(expand_ratio * width)", int(ratio * width)),
        "intermediate_size": ("intermediate_size", options.get("intermediate_size")),
        "rpe_dim": ("rpe_embedding", options.get("rpe_embedding")),
        "rpe_layers": ("rpe_layers", options.get("rpe_layers")),
        "ski_rank": ("rank", options.get("rank")),
        "ski_filter_size": ("nk, made odd,", filter_size and filter_size + (filter_size + 1) % 2),
    }


def fairseq_fields(options: dict, found: dict, side: str) -> dict:
    """The fields from the options of fairseq-evo and ski-tnn. `side` is `decoder` or `encoder`."""
    causal = side == "decoder"
    check_sizes(fairseq_sizes(options, found["hidden_size"], side), found)
    if side == "encoder" and options.get("activation_fn", "gelu") != "gelu":
        raise ValueError(f"activation_fn must be 'gelu' for a conversion, got {options['activation_fn']!r}")
    length = next((options[name] for name in ("tokens_per_sample", "max_target_positions", "max_positions")
                   if options.get(name)), DEFAULT_LENGTH)  # fmt: skip
    return {
        "causal": options.get("causal", causal),
        "tno_type": operator_of(options),
        "gtu_expansion": options.get("expand_ratio", 3),
        "gtu_norm": options.get("use_norm", False),
        "hidden_act": options.get("act_fun", "silu"),
        "rpe_act": options.get("rpe_act", "relu"),
        "fd_act": options.get("rpe_act", "relu"),
        "rpe_residual": options.get("residual", False),
        "norm_type": options.get("norm_type", "layernorm"),
        "norm_position": "pre" if options.get(f"{side}_normalize_before", False) else "post",
        "scale_embedding": not options.get("no_scale_embedding", False),
        "embedding_norm": options.get("layernorm_embedding", False),
        "learnable_decay": options.get("use_multi_decay", False),
        "max_position_embeddings": length,
        "fd_resolution": 1 << (length - 1).bit_length(),
        "hidden_dropout_prob": options.get("dropout", 0.1),
        "classifier_dropout": options.get("pooler_dropout"),
        "initializer": "torch" if causal else "normal",
    } | {f"{name}_token_id": options[f"{name}_token_id"] for name in ("bos", "pad", "eos")
         if f"{name}_token_id" in options}  # fmt: skip


def expansion(found: dict) -> int | float:
    """The `gtu_expansion` that gives the width of the weights."""
    width, ratio = found["hidden_size"], found["gtu_dim"] / found["hidden_size"]
    if ratio.is_integer():
        return int(ratio)
    return ratio if int(ratio * width) == found["gtu_dim"] else math.nextafter(ratio, math.inf)


def decoder_fields(options: dict, found: dict) -> dict:
    return fairseq_fields(options, found, "decoder")


def encoder_fields(options: dict, found: dict) -> dict:
    return fairseq_fields(options, found, "encoder")


def standalone_fields(options: dict, found: dict) -> dict:
    """The fields from the arguments of `TnnLayer` of tnn-pytorch. Those of the model around it have names of here."""
    check_sizes({"hidden_size": ("dim", options.get("dim"))}, found)
    own = {
        "causal": options.get("causal", False),
        "hidden_act": options.get("gtu_act", "silu"),
        "norm_type": options.get("norm_type", "simplermsnorm"),
        "norm_position": "pre" if options.get("prenorm", True) else "res_post",
    }
    around = {"scale_embedding": False, "embedding_norm": False, "hidden_dropout_prob": 0.0}
    around |= {name: value for name, value in options.items() if name in (*around, "max_position_embeddings")}
    return fairseq_fields(options, found, "decoder") | own | around


def rational_fields(options: dict, found: dict) -> dict:
    """The fields from the arguments of `RTF` in `rtf.py`. Other fields are those of `TnnConfig`."""
    constraint = options.get("constraint", "no")
    fields = {name: value for name, value in options.items() if name in TnnConfig.__dataclass_fields__}
    stated = {
        "gtu_dim": ("d_model", options.get("d_model")),
        "rtf_state_size": ("state_size", options.get("state_size")),
        "hidden_size": ("hidden_size", options.get("hidden_size")),
    }
    check_sizes(stated, found)
    return fields | {
        "tno_type": "rtf",
        "causal": not options.get("bidirectional", False),
        "gtu_expansion": expansion(found),
        "rtf_num_denominators": options.get("num_a"),
        "rtf_constraint": None if constraint == "no" else constraint,
        "max_position_embeddings": options["trunc_len"],
    }


@dataclass(frozen=True)
class Architecture:
    """A kind of checkpoint.

    Attributes:
        fields: the fields of the configuration from the options and from the sizes of the weights.
        head: the head, one of `HEADS`.
        options: the registered defaults.
        required: the options that must be given.
        names: patterns of official names, and our names.
        check: refuses tensors, in official names, and options.
        prepare: brings tensors, in our names, into their form here, in place.
        sizes: the fields that follow from the weights.
    """

    fields: Callable[[dict, dict], dict]
    head: str
    options: dict = field(default_factory=dict)
    required: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = tuple(RENAMED)
    check: Callable[[dict, dict], None] = lambda tensors, options: check_supported(options)
    prepare: Callable[[dict, dict], None] = lambda tensors, options: None
    sizes: Callable[[dict], dict] = sizes


def s4_model(head: str = "sequence-classification", **options) -> Architecture:
    """A model of the Long Range Arena of the released RTF code, with the options of its experiment."""

    def check(tensors, given):
        refuse_other_parts(tensors)
        check_values(given, S4_VALUES)

    # The norms of all experiments. Weights without their buffers would pass for another norm.
    options = {"norm": "batch", "prenorm": True} | options
    return Architecture(
        s4_fields, head, options, names=S4_NAMES, check=check, prepare=prepare_s4, sizes=s4_sizes
    )  # fmt: skip


def hyena_model(**options) -> Architecture:
    """The language model of the released RTF code, with the options of its experiment."""

    def check(tensors, given):
        refuse_other_parts(tensors)
        check_values(given, HYENA_VALUES)

    return Architecture(
        hyena_fields, "causal-lm", options, names=HYENA_NAMES, check=check, prepare=prepare_hyena, sizes=hyena_sizes
    )


PUBLISHED = {
    "expand_ratio": 3,
    "act_fun": "silu",
    "glu_act": "silu",
    "use_norm": False,
    "norm_type": "simplermsnorm",
    "residual": False,
}
CAUSAL = PUBLISHED | {"causal": True, "decoder_normalize_before": True}
MASKED = PUBLISHED | {"encoder_normalize_before": False, "no_scale_embedding": True, "layernorm_embedding": True}
DECAY = {"use_decay": True, "gamma": 0.99}
ARCHITECTURES = {
    "tnn_v2_decay_99_pre": Architecture(decoder_fields, "causal-lm", CAUSAL | DECAY),
    "tnn_v2_decay_99_pre_l6": Architecture(decoder_fields, "causal-lm", CAUSAL | DECAY),
    "tnn_v2_decay_99_pre_usenorm": Architecture(decoder_fields, "causal-lm", CAUSAL | DECAY | {"use_norm": True}),
    "tnn_v2_decay_99_post": Architecture(
        decoder_fields, "causal-lm", CAUSAL | DECAY | {"decoder_normalize_before": False}
    ),
    "tnn_v2_no_decay": Architecture(decoder_fields, "causal-lm", CAUSAL | {"use_decay": False}),
    "roberta_tnn_v2_decay_99": Architecture(encoder_fields, "masked-lm", MASKED | DECAY),
    "laxtnn_alm_tno_fd": Architecture(decoder_fields, "causal-lm", CAUSAL | {"tno_type": "tno_fd"}),
    "laxtnn_alm_tno_fd_3lyrs": Architecture(decoder_fields, "causal-lm", CAUSAL | {"tno_type": "tno_fd"}),
    "laxtnn_blm_tno_fd_3lyrs": Architecture(encoder_fields, "masked-lm", MASKED | {"tno_type": "tno_fd"}),
    "ski_blm_inv_time": Architecture(encoder_fields, "masked-lm", MASKED | DECAY | {"tno_type": "skitno_inv_time"}),
    "tnn_pytorch": Architecture(standalone_fields, "base"),
    "rtf": Architecture(rational_fields, "base", required=("trunc_len",)),
    "rtf-listops": s4_model(trunc_len=2048),
    "rtf-imdb": s4_model(trunc_len=4096),
    "rtf-aan": s4_model("sequence-pair-classification", trunc_len=4000),
    "rtf-cifar": s4_model(trunc_len=1024, dataset="cifar"),
    "rtf-pathfinder": s4_model(trunc_len=1024, dataset="pathfinder"),
    "rtf-pathx": s4_model(trunc_len=16384, dataset="pathfinder"),
    "hyena_rtf": hyena_model(trunc_len=1024, constraint="l1_montel"),
}
