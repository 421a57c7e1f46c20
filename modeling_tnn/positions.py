"""Absolute positions of tokens, and their sines and cosines. No parameters here.

B batch, L length.
"""

import math

import torch


def token_positions(attention_mask: torch.Tensor | None, past_length: int, tokens: torch.Tensor) -> torch.Tensor:
    """The positions of `tokens` `(B, L, ...)` among the real ones of their row, `(B, L)` or `(1, L)`.

    Args:
        attention_mask: `(B, past_length + L)`.
    """
    length = tokens.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + length, device=tokens.device)[None]
    return (attention_mask.ne(0).cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


def sinusoidal_embedding(positions: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Sines (even channels) and cosines (odd ones) of the positions `(B, L)` at `size` / 2 rates, `(B, L, size)`.

    Channel c has the rate 10000^(-2 floor(c/2) / size) (Vaswani et al., 2017, section 3.5).
    """
    channel = torch.arange(size, device=positions.device)
    rates = torch.exp(channel.div(2, rounding_mode="floor") * (-2 * math.log(10000.0) / size))  # (size,)
    angles = positions[..., None] * rates  # (B, L, size)
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).to(dtype)
