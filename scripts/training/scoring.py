"""The losses of hidden tokens in rows of a text, and sums over tokens, bytes and documents.

Bits per byte compare models with different tokenizers, if they count the bytes of the scored tokens.

L length, S length without the special tokens, T tokens, M hidden tokens, N documents.
"""

import torch
from scipy import stats
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from modeling_tnn.data.text import with_line_break
from modeling_tnn.tools.comparing import rows_of


def hidden_tokens(count: int, share: float, seed: int) -> torch.Tensor:
    """Draw the mask of the T = `count` tokens of a text, each hidden with the probability `share`, `(T,)`."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share


@torch.inference_mode()
def score_masked(model, ids, hidden, length: int, mask_token: int, enclosing, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each hidden token of ids `(T,)`, given the others of its row, `(M,)` in float64 on the CPU.

    All `hidden` `(T,)` tokens become the mask token, other than in training, where a fifth of them stay or become
    others. `length` counts the special tokens `enclosing` a row. A row of more than `tokens_per_pass` is read whole,
    because its tokens see each other.
    """
    before, after = (torch.tensor(tokens, dtype=torch.long) for tokens in enclosing)
    size = length - len(before) - len(after)  # S
    count, nats = max(1, tokens_per_pass // length) * size, []
    for rows, where in zip(*(rows_of(values, size, size, count) for values in (ids, hidden)), strict=True):  # (B, S)
        inputs = [before.expand(len(rows), -1), rows.masked_fill(where, mask_token), after.expand(len(rows), -1)]
        logits = model(torch.cat(inputs, dim=1).to(model.device)).logits  # (B, L, V)
        logits = logits[:, len(before) : len(before) + rows.shape[1]][where.to(model.device)].float()  # (M', V)
        nats.append(cross_entropy(logits, rows[where].to(model.device), reduction="none").cpu().double())
    return torch.cat(nats)


def by_context(nats: torch.Tensor, length: int) -> list[dict[str, float]]:
    """The mean loss in nats of tokens with 1, 2 to 3, 4 to 7, .. tokens before them in their row.

    `nats` are the losses `(T-1,)` of rows of `length` without a stride, from `score_tokens`.
    """
    before = torch.arange(len(nats)) % (length - 1) + 1  # (T-1,)
    found = []
    for first in (2**power for power in range(int(before.max()).bit_length())):
        own = nats[(before >= first) & (before < 2 * first)]
        figures = {"loss": own.mean().item(), "tokens": len(own)}
        found.append({"first": first, "last": min(2 * first, length) - 1} | figures)
    return found


def interval(totals: torch.Tensor, sizes: torch.Tensor) -> float | None:
    """Half the width of the 95% interval of `sum(totals) / sum(sizes)`, with the N documents as independent samples.

    By the variance of a ratio of means (Cochran 1977, Sampling Techniques, equation 6.13). None for one document.
    `totals` and `sizes` are those of each document `(N,)`, such as its bits and its bytes.
    """
    count, whole = len(totals), sizes.sum()
    if count < 2:
        return None
    rest = totals - totals.sum() / whole * sizes  # (N,)
    error = (count / (count - 1) * rest.square().sum()).sqrt() / whole
    return stats.t.ppf(0.975, count - 1) * error.item()


def bytes_until(texts: list[str], tokens: list[list[int]], tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """The number of bytes of the text, in UTF-8, up to the end of its first `count` tokens.

    Characters between two tokens count for the second one, and those at the end of a line for its last token. A token
    that ends within a character counts the whole character. `texts` are lines, counted with one line break after each,
    and `tokens` their ids, from `text.tokenize`.
    """
    total = 0
    for line, ids in zip(map(with_line_break, texts), tokens, strict=True):
        if count == 0:
            break
        if count >= len(ids):
            total += len(line.encode())
        elif not tokenizer.is_fast:
            raise ValueError(f"The tokenizer must be fast for bits per byte, got {type(tokenizer).__name__}")
        else:
            places = tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            total += len(line[: places["offset_mapping"][count - 1][1]].encode())
        count -= min(count, len(ids))
    return total
