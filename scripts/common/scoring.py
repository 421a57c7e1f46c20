"""Perplexity of language models over rows of a text. Every token is scored once, given those before it in its row.

B rows, L length, T tokens.
"""

import time
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy


def score_rows(model, rows: torch.Tensor, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of `rows` `(B, L)` except the first, given those before it, `(B, L-1)`."""
    part = max(1, tokens_per_pass // len(rows))
    cached = part < rows.shape[1]
    nats, cache = [], None
    for start in range(0, rows.shape[1], part):
        output = model(rows[:, start : start + part], past_key_values=cache, use_cache=cached)
        cache = output.past_key_values
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
def evaluate(model, ids: torch.Tensor, length: int, stride: int | None, tokens_per_pass: int) -> dict:
    """The mean loss in nats over all tokens of ids `(T,)` except the first, their number, and the seconds.

    `length` is at most T. Without a stride, rows overlap by one token: the last token of a row is the first of the
    next one, so that every token is scored.
    """
    stride = length - 1 if stride is None else stride
    start, total, count = time.perf_counter(), 0.0, 0
    for index, rows in enumerate(batches(ids, length, stride, tokens_per_pass)):
        nats = score_rows(model, rows.to(model.device), tokens_per_pass).double()  # (B, L-1)
        kept = nats[:, length - 1 - stride :]  # the first tokens of a row are the last ones of the row before
        if index == 0:
            kept = torch.cat([nats[0], kept[1:].flatten()])
        total, count = total + kept.sum().item(), count + kept.numel()
    return {"loss": total / count, "tokens": count, "seconds": time.perf_counter() - start}
