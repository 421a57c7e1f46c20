"""Perplexity of language models over rows of a text. Every token is scored once, given those before it in its row.

B rows, L length, T tokens, N documents.
"""

import time
from collections.abc import Iterator

import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.recurrence import DivergenceError


def score_rows(model, rows: torch.Tensor, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of `rows` `(B, L)` except the first, given those before it, `(B, L-1)`.

    Long rows are read in parts with a cache, to save memory. Where the state of a recurrence diverges, they are read
    at once: the convolution has a result for any poles.
    """
    try:
        return _score_parts(model, rows, max(1, tokens_per_pass // len(rows)))
    except DivergenceError:
        return _score_parts(model, rows, rows.shape[1])


def _score_parts(model, rows: torch.Tensor, part: int) -> torch.Tensor:
    cached = part < rows.shape[1]
    nats, cache = [], None
    for start in range(0, rows.shape[1], part):
        output = model(rows[:, start : start + part], use_cache=cached, **{CACHE: cache})
        cache = getattr(output, CACHE)
        targets = rows[:, start + 1 : start + part + 1]  # (B, P), one less in the last part
        logits = output.logits[:, : targets.shape[1]].float()  # (B, P, V)
        nats.append(cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    return torch.cat(nats, dim=1)


def batches(ids: torch.Tensor, length: int, stride: int, tokens_per_pass: int) -> Iterator[torch.Tensor]:
    """Batches `(B, L)` of rows of ids `(T,)`, T >= L, that begin every `stride` tokens, as many as fit into a pass.

    The rest of the text is a shorter row. It comes last, as a batch of its own, so there is no padding.
    """
    rows = ids.unfold(0, length, stride)  # (R, L)
    yield from rows.split(max(1, tokens_per_pass // length))
    if (len(rows) - 1) * stride + length < len(ids):
        yield ids[None, len(rows) * stride :]


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


def evaluate(model, ids: torch.Tensor, length: int, stride: int | None, tokens_per_pass: int) -> dict:
    """The mean loss in nats over all tokens of ids `(T,)` except the first, their number, and the seconds.

    The arguments are those of `score_tokens`.
    """
    start = time.perf_counter()
    nats = score_tokens(model, ids, length, stride, tokens_per_pass)
    return {"loss": nats.mean().item(), "tokens": len(nats), "seconds": time.perf_counter() - start}


def by_context(nats: torch.Tensor, length: int) -> list[dict[str, float]]:
    """The mean loss in nats of tokens with 1, 2 to 3, 4 to 7, .. tokens before them in their row.

    Args:
        nats: the losses `(T-1,)` of rows of `length` without a stride, from `score_tokens`.
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

    Args:
        totals, sizes: for each document `(N,)`, such as its bits and its bytes.
    """
    count, whole = len(totals), sizes.sum()
    if count < 2:
        return None
    rest = totals - totals.sum() / whole * sizes  # (N,)
    error = (count / (count - 1) * rest.square().sum()).sqrt() / whole
    return stats.t.ppf(0.975, count - 1) * error.item()
