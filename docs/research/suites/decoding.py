"""The cost of a new token in one operator, by the length of the context, compared with dot products.

Each repeat of a recurrence covers a whole block of its transforms. Dot products with all earlier tokens are the naive
method. `matmul` and `vecdot` are two ways to compute them; which one is faster depends on the size.
"""

from functools import partial

import torch
from suites.peers import FIELDS

from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.tno import continue_sequence
from modeling_tnn.tno_auto import build_tno
from tnn_programs.benchmarks.measure import clock, markdown, ratio

FORMATS = {"context": "", "way": "", "microseconds_per_token": ".0f", "best_dot_over_this": ".1f"}
FORMATS |= {"over_shortest_context": ".2f"}
BLOCK = 2048
DOTS = ("matmul", "vecdot")
DOT_TOKENS = 16


class Recurrent:
    """An operator after a context, ready to decode."""

    def __init__(self, way: str, args, context: int):
        torch.manual_seed(0)
        self.operator = build_tno(TnnConfig(hidden_size=args.hidden_size, num_hidden_layers=1, **FIELDS[way]))
        self.operator.reset_parameters()
        self.operator.to(args.device)
        self.layer, self.tokens = TnnCacheLayer(), BLOCK
        shape = (args.batch_size, context, self.operator.channels)
        self.v = torch.randn(shape[0], 1, shape[2], device=args.device)
        continue_sequence(self.operator, self.layer, torch.randn(shape, device=args.device))

    def step(self):
        continue_sequence(self.operator, self.layer, self.v)


class Dot:
    """A dot product: the newest output from all inputs `(B, D, T)` and T taps."""

    def __init__(self, way: str, args, context: int):
        shape = (args.batch_size, int(3 * args.hidden_size), context)
        self.inputs, self.taps = torch.randn(shape, device=args.device), torch.randn(shape[1:], device=args.device)
        self.way, self.tokens = way, DOT_TOKENS

    def step(self):
        if self.way == "vecdot":
            torch.linalg.vecdot(self.inputs, self.taps)
        else:
            torch.matmul(self.inputs.transpose(0, 1), self.taps[..., None])  # (D, B, 1)


@torch.inference_mode()
def run(args) -> list[dict]:
    """One row for each context and variant: microseconds per token, median of the repeats."""
    times = {}
    for context in args.contexts:
        decoders = {way: (Dot if way in DOTS else Recurrent)(way, args, context) for way in args.ways}
        for decoder in decoders.values():
            decoder.step()
        for _ in range(args.repeats):
            for way, decoder in decoders.items():
                start = clock(args)
                for _ in range(decoder.tokens):
                    decoder.step()
                times.setdefault((context, way), []).append((clock(args) - start) / decoder.tokens)
    return [row(times, context, way, args) for context, way in times]


def row(times: dict[tuple[int, str], list[float]], context: int, way: str, args) -> dict:
    seconds = times[context, way]
    dots = [times[context, dot] for dot in DOTS if (context, dot) in times]
    best = [min(repeat) for repeat in zip(*dots, strict=True)]
    return {
        "context": context,
        "way": way,
        "microseconds_per_token": 1e6 * sorted(seconds)[len(seconds) // 2],
        "best_dot_over_this": ratio(best, seconds) if best else None,
        "over_shortest_context": ratio(seconds, times[min(args.contexts), way]),
    }


table = partial(markdown, formats=FORMATS)
