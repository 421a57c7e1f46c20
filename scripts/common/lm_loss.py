"""The losses of language models on batches of blocks, in nats per predicted token."""

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from modeling_tnn import TnnConfig


def token_losses(logits: torch.Tensor, labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """The cross entropy in nats of logits `(B, L, V)`, `(B, L)` or `(B, L-1)`; 0 where labels `(B, L)` are -100."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    # Rows of words: with the words in the second dimension it takes 1.7 times as long.
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)


def count_targets(labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """The number of predicted tokens in each row of labels `(B, L)`, `(B,)`."""
    return (labels[:, 1:] if causal else labels).ne(-100).sum(dim=1)


def logits_of(model: torch.nn.Module, batch: dict[str, torch.Tensor], causal: bool) -> torch.Tensor:
    """The logits `(B, L, V)` of a batch, without a cache."""
    return model(input_ids=batch["input_ids"], **({"use_cache": False} if causal else {})).logits


def summed_loss(
    model: torch.nn.Module, config: PreTrainedConfig, batch: dict[str, torch.Tensor], causal: bool
) -> torch.Tensor:
    """The sum of the losses of a batch with labels. A TNN computes it without the logits of the whole batch.

    Args:
        model: in training mode, maybe wrapped for several devices.
        config: the configuration of the model inside.
    """
    if not isinstance(config, TnnConfig):
        return token_losses(logits_of(model, batch, causal), batch["labels"], causal).sum()
    options = {"use_cache": False} if causal else {}
    return model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=1, **options).loss
