"""What a model does with its inputs around the layers: checks of ids and masks, alignment, pooling.

B batch, L length, d hidden size. A mask is `(B, L)`, 0 at padding and anything else at real tokens.
"""

import torch

from .toeplitz import transform_dtype


def check_input_ids(input_ids: torch.Tensor, vocab_size: int):
    """Refuse ids that have no embedding. On CPU only: elsewhere reading the ids would stall the device.

    Raises:
        ValueError: the shape is not `(B, L)` or an id is outside the vocabulary.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have shape (B, L), not {tuple(input_ids.shape)}.")
    if input_ids.device.type != "cpu" or input_ids.numel() == 0 or torch.compiler.is_compiling():
        return
    lowest, highest = input_ids.min().item(), input_ids.max().item()
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"input_ids holds {lowest if lowest < 0 else highest}: ids must be in [0, vocab_size={vocab_size})."
        )


def check_attention_mask(
    attention_mask: torch.Tensor | None, inputs_embeds: torch.Tensor, past_length: int
) -> torch.Tensor | None:
    """The part of the mask that belongs to `inputs_embeds` `(B, L, d)`, `(B, L)`; None if all of it is real.

    Raises:
        ValueError: the sequence is empty or the mask is not `(B, past_length + L)`.
    """
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The sequence is empty: inputs have shape {tuple(inputs_embeds.shape)}; L must be at least 1."
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, past_length + length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: it must be (B, past length + L) = "
            f"{(batch, past_length + length)}, one entry a token."
        )
    attention_mask = attention_mask[:, -length:] != 0
    if not torch.compiler.is_compiling() and attention_mask.all():
        return None
    return attention_mask


def first_real_token(attention_mask: torch.Tensor) -> torch.Tensor:
    """Its position in each row, `(B,)`; 0 in a row without any."""
    return attention_mask.ne(0).int().argmax(dim=1)


def roll(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Each row of `x` `(B, L, D)` shifted by its entry of `shift` `(B,)` towards the end, around the corner."""
    position = torch.arange(x.shape[1], device=x.device)
    index = (position - shift[:, None]) % x.shape[1]  # (B, L)
    return x.gather(1, index[..., None].expand_as(x))


def mean_of_real_tokens(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`(B, L, d)` to `(B, d)`; 0 for a row without real tokens."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    real = attention_mask.ne(0)
    dtype = transform_dtype(hidden_states.dtype)  # float16 overflows in long sums
    total = hidden_states.masked_fill(~real[..., None], 0).sum(dim=1, dtype=dtype)  # (B, d)
    return (total / real.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)


def last_real_token(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """`(B, L, d)` to `(B, d)`; the last position of a row without real tokens."""
    if attention_mask is None:
        return hidden_states[:, -1]
    length = hidden_states.shape[1]
    from_end = attention_mask[:, -length:].ne(0).flip(1).int().argmax(dim=1)  # (B,)
    return hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), length - 1 - from_end]
