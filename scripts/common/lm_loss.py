"""The losses of language models on batches of blocks, in nats per predicted token."""

from functools import partial

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_tnn import TnnConfig
from modeling_tnn.kernels.loss import linear_cross_entropy
from modeling_tnn.mixers import is_plain_linear


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
    """The sum of the losses of a batch with labels, without the logits of the whole batch if the head allows it.

    Args:
        model: in training mode, maybe wrapped for several devices.
        config: the configuration of the model inside.
    """
    if isinstance(config, TnnConfig):
        options = {"use_cache": False} if causal else {}
        return model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=1, **options).loss
    inner = getattr(model, "module", model)  # as DistributedDataParallel and FSDP name it
    head = inner.get_output_embeddings() if isinstance(inner, PreTrainedModel) else None
    if head is not None and is_plain_linear(head):
        made = []
        head.forward = partial(loss_of_head, head, batch["labels"], causal, made)
        try:
            found = logits_of(model, batch, causal)
        finally:
            del head.forward
        # Some models scale or cap their logits after the head, and need them.
        if len(made) == 1 and found is made[0] and found._version == 0:
            return found.sum()
    return token_losses(logits_of(model, batch, causal), batch["labels"], causal).sum()


def loss_of_head(
    head: torch.nn.Linear, labels: torch.Tensor, causal: bool, made: list[torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """The loss of hidden states `(B, L, d)`, in the place and with the dimensions of logits: `(1, 1, 1)`.

    It is computed where the head is called, because engines of several devices have its weight there alone.
    """
    if causal:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    loss = linear_cross_entropy(hidden.flatten(0, 1), head.weight, head.bias, labels.flatten())
    made.append(loss.expand(1, 1, 1))
    return made[-1]
