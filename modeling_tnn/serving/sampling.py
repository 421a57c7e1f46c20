"""Choose the next tokens of many texts at once, each with its own settings and random numbers.

B rows, N of which draw, V vocabulary. The tokens are those of transformers' processors for each row, and of
`torch.multinomial`, which takes the largest p / q, with q from an exponential distribution.
"""

from collections.abc import Sequence

import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in the order of `generate`
ALL = {"top_k": 2**31, "top_p": 2.0, "filter_value": -torch.inf, "min_tokens_to_keep": 1}  # no token is left out


def sampling_of(processors: Sequence, do_sample: bool) -> tuple[float, int, float] | None:
    """`temperature`, or 0 for the likeliest token, `top_k`, and 1 - `top_p`; None with other processors."""
    kinds, given = [type(one) for one in processors], {"temperature": float(do_sample)} | ALL
    if kinds != [kind for kind in WARPERS if do_sample and kind in kinds]:
        return None
    for one in processors:
        given |= vars(one)
    is_plain = all(given[name] == ALL[name] for name in ("filter_value", "min_tokens_to_keep"))
    return (given["temperature"], given["top_k"], 1 - given["top_p"]) if is_plain else None


GREEDY = sampling_of((), do_sample=False)


class Draw:
    """How the next tokens of texts are chosen, at most `steps`: some rows draw them, others get the likeliest.

    With `all_rows` the shapes of what is computed do not depend on who draws.
    """

    def __init__(self, requests: Sequence, steps: int, vocabulary: int, device: torch.device, all_rows: bool = False):
        rows = {row: GREEDY if one.is_done else one.sampling or GREEDY for row, one in enumerate(requests)}
        rows = {row: one for row, one in rows.items() if all_rows or one[0]}
        self.kind = tuple(any(one[i] != GREEDY[i] for one in rows.values()) for i in range(3))
        self.rows = slice(None) if all_rows else torch.tensor([*rows], dtype=torch.long, device=device)
        self.settings = torch.tensor([*rows.values()], dtype=torch.float64, device=device).view(-1, 3)  # (N, 3)
        self.noise = torch.ones(steps, len(rows) if self.kind[0] else 0, vocabulary, device=device)  # (K, N, V)
        for noise, (row, one) in zip(self.noise.unbind(1), rows.items(), strict=False):  # none if no row draws
            if one[0]:
                requests[row].fill_noise(noise)

    def choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """The tokens `(B,)` for logits `(B, V)` in float32; -1 where probabilities are not finite."""
        tokens = logits.argmax(-1)
        if not self.kind[0]:
            return tokens
        temperature, top_k, cut = self.settings.split(1, dim=1)  # (N, 1)
        draws, logits = temperature > 0, logits[self.rows]
        scores = logits / temperature.where(draws, 1).float()
        if self.kind[1]:
            last = top_k.long().clamp(max=scores.shape[1]) - 1
            scores = scores.masked_fill(scores < scores.sort(descending=True).values.gather(1, last), -torch.inf)
        if self.kind[2]:
            ordered, places = scores.sort()
            removed = ordered.softmax(-1).cumsum(-1) <= cut.float()
            removed[:, -1] = False
            scores = scores.masked_fill(removed.scatter(1, places, removed), -torch.inf)
        scores = torch.where(draws, scores.softmax(-1) / self.noise[step], logits)
        chosen = scores.argmax(-1, keepdim=True)
        tokens[self.rows] = chosen.masked_fill(draws & scores.gather(1, chosen).isnan(), -1).squeeze(1)
        return tokens
