"""Padding: masks, alignment to the first real token, positions and pooling over real tokens.

B batch, L length, d hidden size. A mask is `(B, L)`, 0 at padding and anything else at real tokens.
"""

import torch
from transformers.cache_utils import Cache

from .inputs import _check_device, can_be_read, require_tensor
from .numerics import compute_dtype


def real_tokens(input_ids: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor | None:
    """The mask `(B, L)` of tokens that are not `pad_token_id`, or None if the ids or the padding token are unknown."""
    return None if input_ids is None or pad_token_id is None else input_ids != pad_token_id


def check_attention_mask(
    attention_mask: torch.Tensor | None, inputs_embeds: torch.Tensor, past_length: int
) -> torch.Tensor | None:
    """The part `(B, L)` of the mask for the tokens of `inputs_embeds` `(B, L, d)`, or None if all tokens are real.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: the sequence is empty, or the mask is not `(B, past_length + L)` or `(1, past_length + L)`.
    """
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The length of the sequence must be at least 1, got inputs of shape {tuple(inputs_embeds.shape)}"
        )
    if attention_mask is None:
        return None
    require_tensor("attention_mask", attention_mask, "(B, L)")
    if attention_mask.shape not in ((batch, past_length + length), (1, past_length + length)):
        raise ValueError(
            f"`attention_mask` must have shape (B, past length + L) = {(batch, past_length + length)}, one entry for "
            f"each token, got {tuple(attention_mask.shape)}"
        )
    _check_device("attention_mask", attention_mask, inputs_embeds)
    attention_mask = (attention_mask[:, -length:] != 0).expand(batch, length)
    # To learn that a mask hides nothing costs an accelerator more than to apply it.
    return None if can_be_read(attention_mask) and attention_mask.all() else attention_mask


def first_real_token(attention_mask: torch.Tensor) -> torch.Tensor:
    """The position of the first real token in each row, `(B,)`; 0 in a row without real tokens."""
    return attention_mask.ne(0).int().argmax(dim=1)


def roll(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The rows of `x` `(B, L, D)`, each rotated towards its end by its entry of `shift` `(B,)`, at most L."""
    length = x.shape[1]
    index = torch.arange(length, device=x.device) - shift[:, None]  # (B, L), within -L .. 2L - 1
    # Not index % length: the exporter to ONNX supports no remainder by a size.
    index = torch.where(index < 0, index + length, index)
    index = torch.where(index < length, index, index - length)
    return x.gather(1, index[..., None].expand_as(x))


def mean_of_real_tokens(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mean over the real tokens, `(B, L, d)` to `(B, d)`; 0 for a row without real tokens."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    real = attention_mask[:, -hidden_states.shape[1] :].ne(0)
    dtype = compute_dtype(hidden_states.dtype)  # float16 overflows in long sums
    total = hidden_states.masked_fill(~real[..., None], 0).sum(dim=1, dtype=dtype)  # (B, d)
    return (total / real.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)


def last_real_token(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The last real token, `(B, L, d)` to `(B, d)`; the last position in a row without real tokens."""
    if attention_mask is None:
        return hidden_states[:, -1]
    length = hidden_states.shape[1]
    from_end = attention_mask[:, -length:].ne(0).flip(1).int().argmax(dim=1)  # (B,)
    rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)  # not len(): export would fix it
    return hidden_states[rows, length - 1 - from_end]


def token_positions(attention_mask: torch.Tensor | None, past_length: int, tokens: torch.Tensor) -> torch.Tensor:
    """The positions of `tokens` `(B, L, ...)`, counted from the first real token of a row, `(B, L)` or `(1, L)`.

    Args:
        attention_mask: `(B, past_length + L)`.
    """
    length = tokens.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + length, device=tokens.device)[None]
    return (attention_mask.ne(0).cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


POOLINGS = {"last": last_real_token, "mean": mean_of_real_tokens}


def pool_tokens(pooling: str, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """One vector for each sequence, `(B, L, d)` to `(B, d)`. `pooling` is a name in `POOLINGS`."""
    if attention_mask is not None:
        # `device_map` may put the last layers on another device than the inputs.
        attention_mask = attention_mask.to(hidden_states.device)
    return POOLINGS[pooling](hidden_states, attention_mask)


def check_pooled_whole(pooling: str, past_key_values: Cache | None):
    """Check that mean pooling sees the whole text: a cache does not keep the hidden states of earlier tokens.

    Raises:
        ValueError: `pooling` is the mean, and the cache holds tokens.
    """
    # The model refuses objects that are not caches.
    past_length = past_key_values.get_seq_length() if isinstance(past_key_values, Cache) else 0
    if pooling == "mean" and past_length > 0:
        raise ValueError(
            "`past_key_values` must be empty with classifier_pooling='mean', which needs the hidden states of all "
            f"tokens, got {past_length} tokens. Give the whole text at once."
        )
