"""Transformers with as many parameters in a layer as a TNN classifier.

A TNN layer has 3 e d + 3 g d parameters in its linear maps: d hidden size, e and g the widths of its units.
"""

from transformers import ModernBertConfig, PreTrainedConfig, ViTConfig

from modeling_tnn import TnnConfig


def modernbert_like(config: TnnConfig) -> PreTrainedConfig:
    """A ModernBERT of the same width and depth, with as many parameters in a layer.

    Like a TNN classifier, it pools by the mean of all tokens. A TNN layer has 3 e d + 3 g d parameters in its linear
    maps (e and g the widths of its units), a transformer layer 4 d^2 + 3 d f.
    """
    width, dropout = config.hidden_size, config.hidden_dropout_prob
    inner = max(width, config.gtu_dim + config.intermediate_size - 4 * width // 3)
    return ModernBertConfig(
        vocab_size=config.vocab_size,
        hidden_size=width,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=max(1, width // 32),
        intermediate_size=inner,
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        max_position_embeddings=config.max_position_embeddings,
        global_attn_every_n_layers=1,
        classifier_pooling="mean",
        num_labels=config.num_labels,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
    )


def vit_like(config: TnnConfig) -> PreTrainedConfig:
    """A ViT of the same width and depth, with as many parameters in a layer.

    A TNN layer has 3 e d + 3 g d parameters in its linear maps (e and g the widths of its units), a transformer layer
    4 d^2 + 2 d f.
    """
    width = config.hidden_size
    return ViTConfig(
        hidden_size=width,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=max(width, (3 * (config.gtu_dim + config.intermediate_size) - 4 * width) // 2),
        hidden_dropout_prob=config.hidden_dropout_prob,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.num_channels,
        id2label=config.id2label,
        label2id=config.label2id,
    )
