"""HyenaDNA: the names of its parameters and its options as fields of `TnnConfig`.

Folders of the Hub have a `config.json` beside the weights: `LongSafari/hyenadna-*-hf` with the names of transformers,
the first ones with `weights.ckpt`, whose modules stand inside another one where they were trained with checkpointing.
(Nguyen et al., "HyenaDNA", 2023.) M positions, E features of a position, F units of the filter, d channels.
"""

import re

import torch

from modeling_tnn.data.dna import SPECIAL, VOCABULARY
from tnn_programs.original.names import HYENA_NAMES, layers_of

FILTER = "layers.0.mixer.tno."
NAMES = (
    (r"\.(mixer|mlp)\.layer\.", r".\1."),
    (r"^hyena\.backbone\.", "backbone."),
    *HYENA_NAMES,
    (r"\.tno\.bias$", ".tno.direct"),
    (r"\.tno\.implicit_filter\.1\.freq$", ".tno.freq"),
    # A linear map and a sine by turns.
    (r"\.tno\.implicit_filter\.(\d+)\.(weight|bias)$", lambda found: f".tno.layers.{int(found[1]) // 2}.{found[2]}"),
    (r"\.tno\.pos_emb\.t$", ".tno.times"),
    (r"\.tno\.pos_emb\.z$", ".tno.features"),
    (r"\.tno\.modulation\.deltas$", ".tno.rates"),
)
# From ends of our names to the layout here of the released tensor.
LAYOUTS = {
    "tno.freq": torch.Tensor.flatten,  # (1, F)
    "tno.times": torch.Tensor.flatten,  # (1, M, 1)
    "tno.features": lambda z: z.flatten(0, -2),  # (1, M, E)
    "tno.rates": torch.Tensor.flatten,  # (1, 1, d)
    "short.taps": lambda taps: taps.flatten(1).flip(1),  # (3d, 1, m), from the highest lag on
}
# Options and the only value that can be converted.
VALUES = {"hyena_order": 2, "order": 2, "use_bias": True, "modulate": True, "num_heads": 1, "attn_layer_idx": None}


def layout(name: str, value: torch.Tensor) -> torch.Tensor:
    """A released tensor in its shape here, by our name."""
    return next((change(value) for end, change in LAYOUTS.items() if name.endswith(end)), value)


def prepare(tensors: dict[str, torch.Tensor], options: dict):
    """Bring the filters into their form here, in place. All sines share a parameter, which may have several names."""
    for name in list(tensors):
        value = tensors.pop(name)
        if not re.search(r"implicit_filter\.\d+\.freq$", name):
            tensors[name] = layout(name, value)


def sizes(tensors: dict[str, torch.Tensor]) -> dict:
    """The fields of `TnnConfig` that follow from the weights."""
    if (features := tensors.get(f"{FILTER}features")) is None:
        raise ValueError(f"The checkpoint must hold filters of Hyena, got nothing for {FILTER}features")
    (vocabulary, width), (length, emb_dim) = tensors["embed_tokens.weight"].shape, features.shape
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "gtu_dim": width,
        "num_hidden_layers": layers_of(tensors),
        "intermediate_size": len(tensors["layers.0.glu.up_proj.weight"]),
        "short_conv_kernel": tensors["layers.0.mixer.short.taps"].shape[1],
        "hyena_filter_length": length,
        "hyena_filter_emb_dim": emb_dim,
        "hyena_filter_order": len(tensors[f"{FILTER}freq"]),
        "hyena_filter_inner_mlps": sum(name.startswith(f"{FILTER}layers.") for name in tensors) // 2 - 1,
    }


def fields(options: dict, found: dict) -> dict:
    """The other fields. Those of dropout matter for training alone; the one of the embeddings is left out."""
    ids = {name: VOCABULARY.index(SPECIAL[name.replace("_id", "")]) for name in ("bos_token_id", "pad_token_id")}
    return ids | {
        "eos_token_id": VOCABULARY.index(SPECIAL["eos_token"]),
        "tno_type": "hyena",
        "toeplitz_mixer": "hyena",
        "gtu_expansion": 1,
        "mlp_act": "gelu_pytorch_tanh",
        "norm_type": "layernorm",
        "layer_norm_eps": options.get("layer_norm_epsilon", 1e-5),
        "scale_embedding": False,
        "max_position_embeddings": found["hyena_filter_length"],
        "hyena_filter_freq": options.get("activation_freq", options.get("w", 10)),
        "hidden_dropout_prob": options.get("resid_dropout", options.get("hyena_dropout", 0.0)),
        "initializer": "normal",
        "initializer_range": options.get("initializer_range", 0.02),
    }
