"""Parameter names and layouts of the released implementations, their counterparts here, and checks of options.

    fairseq-evo    `decoder.` (causal language model) and `encoder.sentence_encoder.` (RoBERTa style)
    ski-tnn        the same names; FD and SKI operators
    tnn-pytorch    `token_mixer.` and `feature_mixer.` in each layer
    rtf-*          S4's stack of blocks, of the Long Range Arena: `encoder.`, `model.layers.`, `decoder.`
    hyena_rtf      the language model of safari with RTF as Hyena's filter: `backbone.layers.`, `lm_head.`

Lightning puts `model.` before the names of a language model. The released code has no other backbone for language.
e channels of the Toeplitz operator in h heads, R inducing points, A denominators of N coefficients.
"""

import re
from collections.abc import Sequence

import torch

# Official name -> our name, applied in this order.
RENAMED = [
    (r"^(decoder|encoder\.sentence_encoder)\.layer_norm\.", "model.norm."),
    (r"^encoder\.sentence_encoder\.layernorm_embedding\.", "model.embed_norm."),
    (r"^(decoder|encoder\.sentence_encoder)\.", "model."),
    (r"^model\.output_projection\.", "lm_head."),
    (r"^encoder\.lm_head\.dense\.", "transform.dense."),
    (r"^encoder\.lm_head\.layer_norm\.", "transform.norm."),
    (r"^encoder\.lm_head\.", "lm_head."),
    (r"^classification_heads\.\w+\.", "classifier."),
    (r"(self_attn_layer_norm|token_norm)\.", "mixer_norm."),
    (r"(final_layer_norm|feature_norm)\.", "glu_norm."),
    (r"(self_attn\.gtu|token_mixer)\.", "mixer."),
    (r"feature_mixer\.", "glu."),
    (r"\btoep\.", "tno."),
    (r"\btoep1\.", "tno.rows."),
    (r"\btoep2\.", "tno.columns."),
    (r"\bdpb\.", "rpe."),
    (r"\bpos1\.1\.", "layers.0.linear."),
    (r"\bpos2\.1\.", "layers.1.linear."),
    (r"\bpos3\.0\.", "out.norm."),
    (r"\bpos3\.2\.", "out.linear."),
    (r"\bo\.(weight|bias)$", r"o_proj.\1"),
    (r"\bl1\.", "gate_proj."),
    (r"\bl2\.", "up_proj."),
    (r"\bl3\.", "down_proj."),
    (r"\bpos_proj\.", "in_proj."),
    (r"\b(layers\.\d+|out)\.0\.", r"\1.norm."),
    (r"\b(layers\.\d+|out)\.2\.", r"\1.linear."),
    (r"\bgamma$", "decay_logit"),
    (r"\bconv_kernel$", "filter"),
    (r"\bh_0$", "direct"),
    (r"\bscalar$", "slack"),
    (r"\b(scale|scala)$", "weight"),
]
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
# Buffers that hold nothing of a model: versions of fairseq's format, bytes of an FP8 library, rotary frequencies.
BOOKKEEPING = re.compile(r"(^|\.)(version|_float_tensor|_extra_state|inv_freq)$")


def our_name(official: str, names: Sequence[tuple[str, str]] = RENAMED) -> str:
    """The name here of an official parameter. `ab` of RTF, which is two parameters here, keeps its name."""
    for pattern, replacement in names:
        official = re.sub(pattern, replacement, official)
    return official


def our_layout(official: str, value: torch.Tensor) -> torch.Tensor:
    """A parameter in its shape here: heads and inducing points are not separate axes.

    `gamma`: (h, 1, e/h) to (e,); `alphas`, `betas`: (1, e, 1, R) to (e, R). Both are head-major as they are.
    """
    if official.endswith("gamma"):
        return value.flatten()
    if official.endswith(("alphas", "betas")):
        return value.reshape(value.shape[1], value.shape[-1])
    return value


def heads_together(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The last map of a bidirectional FD encoder, with rows (head, part, channel) reordered to all real rows first."""
    return value.reshape(num_heads, 2, -1, *value.shape[1:]).transpose(0, 1).flatten(0, 2)


def refuse_other_parts(tensors: dict[str, torch.Tensor]):
    """Refuse tensors, in official names, of parts that this package does not have; name the option behind it."""
    for name in tensors:
        if (option := next((option for part, option in REFUSED.items() if re.search(part, name)), None)) is not None:
            raise ValueError(f"The option {option} must be off for a conversion, got {name}")


def layers_of(tensors: dict[str, torch.Tensor]) -> int:
    """The number of layers of tensors in our names."""
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


def check_values(options: dict, supported: dict, unused: tuple[str, ...] = ()):
    """Refuse options that have another value than the `supported` one, by name."""
    for name, allowed in supported.items():
        if name in options and name not in unused and options[name] != allowed:
            raise ValueError(f"{name} must be {allowed!r} for a conversion, got {options[name]!r}")


def check_stated(options: dict, measured: dict):
    """Refuse options that contradict what the weights say."""
    for name, value in measured.items():
        if options.get(name) is not None and options[name] != value:
            raise ValueError(f"{name} must be {value!r}, as in the weights of the checkpoint, got {options[name]!r}")
