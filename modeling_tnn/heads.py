"""What stands between the hidden states and the answers of the heads.

B batch, L length, d hidden size.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache

from .configuration_tnn import TnnConfig
from .inputs import last_real_token, mean_of_real_tokens
from .norms import LayerNorm


class TnnPredictionHeadTransform(nn.Module):
    """LayerNorm(gelu(W x)), before the vocabulary projection of the masked language model."""

    def __init__(self, config: TnnConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        return self.norm(nn.functional.gelu(self.dense(hidden_states)))


class TnnClassificationHead(nn.Module):
    """Two linear layers with a tanh between them, each after dropout, for `num_features` inputs (d unless given)."""

    def __init__(self, config: TnnConfig, num_features: int | None = None):
        super().__init__()
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.dense = nn.Linear(num_features or config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """`(B, num_features)` to `(B, num_labels)`."""
        return self.out_proj(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


POOLINGS = {"last": last_real_token, "mean": mean_of_real_tokens}


def pool_tokens(config: TnnConfig, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """One vector for a sequence, `(B, L, d)` to `(B, d)`: its last real token or the mean of them."""
    return POOLINGS[config.pooling](hidden_states, attention_mask)


def check_pooled_whole(config: TnnConfig, past_key_values: Cache | None):
    """Refuse a mean of the new tokens alone: a cache does not keep the hidden states of those before.

    Raises:
        ValueError: the mean is to be taken, and the cache holds tokens.
    """
    # What is no cache is refused by the model.
    past_length = past_key_values.get_seq_length() if isinstance(past_key_values, Cache) else 0
    if config.pooling == "mean" and past_length > 0:
        raise ValueError(
            f"past_key_values holds {past_length} tokens: it must hold none with classifier_pooling='mean', which "
            "needs the hidden states of all tokens. Give the whole text at once."
        )
