"""The losses of tokens in rows of a text: of each token, given those before it in its row, and of hidden tokens.

Bits per byte compare models with different tokenizers, if they count the bytes of the scored tokens.

B rows, L length, S length without the special tokens, T tokens, M hidden tokens, N documents.
"""

from collections.abc import Iterator

import torch
from scipy import stats
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.data.text import with_line_break
from modeling_tnn.recurrence import DivergenceError

logger = logging.get_logger(__name__)


def score_rows(model, rows: torch.Tensor, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of `rows` `(B, L)` except the first, given those before it, `(B, L-1)`.

    Long rows are read in parts with a cache, to save memory. Where the state of a recurrence diverges, they are read
    at once, with a warning: up to the trained length, the convolution has a result for any poles.
    """
    try:
        return _score_parts(model, rows, max(1, tokens_per_pass // len(rows)))
    except DivergenceError as error:
        logger.warning_once(f"Rows of {rows.shape[1]} tokens are read at once, which takes more memory. {error}")
        return _score_parts(model, rows, rows.shape[1])


def _score_parts(model, rows: torch.Tensor, part: int) -> torch.Tensor:
    cached = part < rows.shape[1]
    nats, cache = [], {}
    for start in range(0, rows.shape[1], part):
        output = model(rows[:, start : start + part], use_cache=cached, **cache)
        if cached:
            name = CACHE if CACHE in output else "cache_params"  # of Mamba-2 in 5.17
            cache = {name: output[name]}
        targets = rows[:, start + 1 : start + part + 1]  # (B, P), one less in the last part
        logits = output.logits[:, : targets.shape[1]].float()  # (B, P, V)
        nats.append(cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    return torch.cat(nats, dim=1)


def batches(values: torch.Tensor, length: int, stride: int, tokens_per_pass: int) -> Iterator[torch.Tensor]:
    """Batches `(B, L)` of rows of values `(T,)` that begin every `stride` tokens, as many as fit into a pass.

    The rest of the text is a shorter row. It comes last, as a separate batch, so there is no padding.
    """
    rows = values.unfold(0, length, stride) if length <= len(values) else values.new_empty(0, length)  # (R, L)
    if len(rows):
        yield from rows.split(max(1, tokens_per_pass // length))
    if (len(rows) - 1) * stride + length < len(values):
        yield values[None, len(rows) * stride :]


@torch.inference_mode()
def score_tokens(model, ids: torch.Tensor, length: int, stride: int | None, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of ids `(T,)` except the first, `(T-1,)` in float64 on the CPU.

    `length` is at most T. Without a stride, rows overlap by one token: the last token of a row is the first of the
    next one, so that every token is scored.
    """
    stride, scored = length - 1 if stride is None else stride, []
    for index, rows in enumerate(batches(ids, length, stride, tokens_per_pass)):
        nats = score_rows(model, rows.to(model.device), tokens_per_pass).cpu().double()  # (B, L-1)
        kept = nats[:, length - 1 - stride :]  # the first tokens of a row are the last ones of the row before
        scored += [nats[0], kept[1:].flatten()] if index == 0 else [kept.flatten()]
    return torch.cat(scored)


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
    for rows, where in zip(*(batches(values, size, size, count) for values in (ids, hidden)), strict=True):  # (B, S)
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
