"""Perplexity of masked language models over rows of a text. Rows of every length hide and score the same tokens.

B rows, L length, S length without the special tokens, T tokens, M hidden tokens.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy


def hidden_tokens(count: int, share: float, seed: int) -> torch.Tensor:
    """Which of the T = `count` tokens of a text are hidden, each with the probability `share`, `(T,)`."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share


def rows_of(values: torch.Tensor, size: int, count: int) -> Iterator[torch.Tensor]:
    """Batches `(B, size)` of at most `count` rows of values `(T,)`; the rest is a shorter row of its own."""
    whole = len(values) // size * size
    yield from values[:whole].view(-1, size).split(count)
    if whole < len(values):
        yield values[None, whole:]


@torch.inference_mode()
def score_masked(
    model,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    length: int,
    mask_token: int,
    enclosing: tuple[list[int], list[int]],
    tokens_per_pass: int,
) -> torch.Tensor:
    """The loss in nats of each hidden token of ids `(T,)`, given the others of its row, `(M,)` in float64 on the CPU.

    All hidden tokens become the mask token, other than in training, where a fifth of them stay or become others.

    Args:
        hidden: `(T,)`, from `hidden_tokens`.
        length: tokens in a row, with the special tokens of a sentence around it. The last row may be shorter.
        enclosing: those special tokens, before and after a row; fewer than `length`.
        tokens_per_pass: tokens in a forward pass; a longer row is read whole, because its tokens see each other.
    """
    before, after = (torch.tensor(tokens, dtype=torch.long) for tokens in enclosing)
    size = length - len(before) - len(after)  # S
    batches = [rows_of(values, size, max(1, tokens_per_pass // length)) for values in (ids, hidden)]
    nats = []
    for rows, where in zip(*batches, strict=True):  # (B, S) each
        inputs = [before.expand(len(rows), -1), rows.masked_fill(where, mask_token), after.expand(len(rows), -1)]
        logits = model(torch.cat(inputs, dim=1).to(model.device)).logits  # (B, L, V)
        logits = logits[:, len(before) : len(before) + rows.shape[1]][where.to(model.device)].float()  # (M', V)
        nats.append(cross_entropy(logits, rows[where].to(model.device), reduction="none").cpu().double())
    return torch.cat(nats)
