"""ListOps: nested operations on lists of digits (Nangia and Bowman, 2018), by the rules of the Long Range Arena.

A node at depth d (the root has depth 1) is an operator with probability 0.25 if d < 10, otherwise a digit 0 to 9. An
operator is MIN, MAX, MED or SM with equal probability. It has 2 to 10 arguments, each a node at depth d + 1, and is
written `[OP arg .. arg ]`. MED is the integer part of the median, SM the sum modulo 10. A sample has more than 500 and
fewer than 2,000 tokens, and all samples differ.
"""

import random
import statistics
from collections.abc import Iterator

OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
TOKENS = (*map(str, range(10)), *OPERATORS, END)
OPERATOR_PROBABILITY, MOST_DEPTH, MOST_ARGUMENTS = 0.25, 10, 10
SHORTER, LONGER = 500, 2000


class TooLongError(Exception):
    """The error for a tree that is too long for a sample."""


def random_tree(rng: random.Random, tokens: list[str], longer: int = LONGER, depth: int = 1) -> int:
    """Append the tokens of a random node to `tokens` and return its value, or raise if there are `longer` or more."""
    if depth >= MOST_DEPTH or rng.random() >= OPERATOR_PROBABILITY:
        tokens.append(str(rng.randrange(10)))
        return int(tokens[-1])
    name = rng.choice(tuple(OPERATORS))
    tokens.append(name)
    values = [random_tree(rng, tokens, longer, depth + 1) for _ in range(rng.randint(2, MOST_ARGUMENTS))]
    tokens.append(END)
    if len(tokens) >= longer:
        raise TooLongError
    return OPERATORS[name](values)


def samples(count: int, seed: int, shorter: int = SHORTER, longer: int = LONGER) -> Iterator[dict]:
    """`count` different samples, each with `source` (tokens with spaces between), `target` and `length`.

    Args:
        shorter, longer: bounds of the number of tokens, both excluded.
    """
    rng, seen = random.Random(seed), set()  # noqa: S311
    while len(seen) < count:
        tokens: list[str] = []
        try:
            target = random_tree(rng, tokens, longer)
        except TooLongError:
            continue
        source = " ".join(tokens)
        if len(tokens) > shorter and source not in seen:
            seen.add(source)
            yield {"source": source, "target": target, "length": len(tokens)}
