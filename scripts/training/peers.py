"""Peers of a TNN: transformers of the width and depth of a classifier, with its parameters in a layer, and a start.

In its linear maps a TNN layer has 3 e d + 3 g d parameters, one of ModernBERT 4 d^2 + 3 d f, one of ViT 4 d^2 + 2 d f:
d hidden size, e and g the widths of a TNN's units, f that of a transformer's.
"""

import torch
from torch import nn
from transformers import ModernBertConfig, PreTrainedConfig, ViTConfig

from modeling_tnn.configuration_tnn import TnnConfig


def modernbert_like(config: TnnConfig) -> PreTrainedConfig:
    """A ModernBERT that, like a TNN classifier, pools by the mean of all tokens."""
    width, dropout = config.hidden_size, config.hidden_dropout_prob
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_labels")
    return ModernBertConfig(
        num_attention_heads=max(1, width // 32),
        intermediate_size=max(width, config.gtu_dim + config.intermediate_size - 4 * width // 3),
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        global_attn_every_n_layers=1,
        classifier_pooling="mean",
        pad_token_id=0,
        **{name: getattr(config, name) for name in shared},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    )


def vit_like(config: TnnConfig) -> PreTrainedConfig:
    """A ViT for pictures of the same size."""
    width = config.hidden_size
    shared = ("hidden_size", "num_hidden_layers", "hidden_dropout_prob", "image_size", "patch_size", "num_channels")
    return ViTConfig(
        num_attention_heads=max(1, width // 64),
        intermediate_size=max(width, (3 * (config.gtu_dim + config.intermediate_size) - 4 * width) // 2),
        **{name: getattr(config, name) for name in (*shared, "id2label", "label2id")},
    )


@torch.no_grad()
def start_decays(model: nn.Module) -> nn.Module:
    """Give layers of Gated DeltaNet their authors' start (flash-linear-attention 0.6), and return the model.

    A state decays by exp(-A softplus(b)) a token. transformers starts all b at 1, with A up to 16, so that a state
    does not last for two tokens; the authors start softplus(b) between 0.001 and 0.1, as Mamba does.
    """
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            step = 10 ** torch.empty_like(module.dt_bias).uniform_(-3, -1)
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    return model
