"""Logarithms of the probabilities of tokens and of the likeliest ones at their places, and their form at OpenAI.

They are those of the model: temperature and `top_p` have no part in them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

# By this character, tokenizers decode bytes that are no whole character.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
LEAST = -9999.0  # for a token that is never written: JSON has no infinite numbers


class Scored(NamedTuple):
    """A token, the logarithm of its probability, and the likeliest tokens at its place; no numbers for a first one."""

    token: int
    logprob: float | None = None
    likeliest: dict[int, float] | None = None


def score(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[Scored]:
    """The tokens `(L,)` that follow each row of `logits` `(L, V)`, with the `count` likeliest ones at their places."""
    logs = logits.float().log_softmax(-1).clamp_min(LEAST)
    own = logs[torch.arange(len(logs)), list(tokens)].tolist()
    values, ids = (one.tolist() for one in logs.topk(min(count, logs.shape[-1])))
    return list(map(Scored, tokens, own, map(dict, map(zip, ids, values))))


def spell(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token after another one: with the space before it that some tokenizers drop from a first token."""
    once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def of_completion(text_of: Callable[[int], str], scored: Sequence[Scored], offsets: Sequence[int]) -> dict:
    """The field `logprobs` of a completion. `offsets` are the places of the tokens in its text."""
    likeliest = [one.likeliest if one.logprob is None else by_text(text_of, one) for one in scored]
    return {
        "tokens": [text_of(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": likeliest,
        "text_offset": list(offsets),
    }


def of_chat(text_of: Callable[[int], str], scored: Sequence[Scored]) -> dict:
    """The field `logprobs` of a message."""

    def entry(token: int, log: float) -> dict:
        text = text_of(token)
        return {"token": text, "logprob": log, "bytes": None if INCOMPLETE in text else list(text.encode())}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.likeliest.items()]}
        for one in scored
    ]
    return {"content": content, "refusal": None}


def by_text(text_of: Callable[[int], str], one: Scored) -> dict[str, float]:
    """The likeliest tokens and the token itself. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for token, log in (one.likeliest | {one.token: one.logprob}).items():
        text = text_of(token)
        found[text] = max(log, found.get(text, log))
    return found
