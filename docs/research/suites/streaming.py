"""The cost of a text too long for one pass: a model reads it in segments with a cache, by length of the text.

Each length runs in its own process. Memory is the growth of this process after the first segments, when the state has
its full size.
"""

import multiprocessing
import statistics
from functools import partial

import torch
from suites.device import resident_peak
from suites.memory import forget_peak

from modeling_tnn import TnnConfig, TnnModel
from modeling_tnn.cache_tnn import CACHE
from tnn_programs.benchmarks.measure import clock, markdown

FORMATS = {"way": "", "tokens": "", "microseconds_per_token": ".1f", "over_shortest": ".2f"}
FORMATS |= {"peak_mebibytes": ".0f", "growth": ".3f"}
FIELDS = {
    "rpe": {"tno_type": "rpe"},
    "fd": {"tno_type": "fd"},
    "rtf": {"tno_type": "rtf", "rtf_constraint": "l1_montel", "rtf_initializer": "xavier"},
}
WARM_UP = 3


@torch.inference_mode()
def stream(way: str, args, tokens: int) -> dict:
    """The time per token of the median segment, and the peak memory."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = {"vocab_size": 2, "hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers}
    model = TnnModel(TnnConfig(**sizes, **FIELDS[way])).eval().to(args.device)
    cache, times, before = None, [], 0
    for segment in range(tokens // args.segment):
        embeddings = torch.randn(1, args.segment, args.hidden_size, device=args.device)
        start = clock(args)
        cache = model(inputs_embeds=embeddings, use_cache=True, **{CACHE: cache})[CACHE]
        times.append(clock(args) - start)
        if segment == WARM_UP - 1:
            before = peak_bytes(args)
            forget_peak()
    seconds = statistics.median(times[WARM_UP:])
    return {
        "way": way,
        "tokens": tokens,
        "microseconds_per_token": 1e6 * seconds / args.segment,
        "mean_microseconds_per_token": 1e6 * statistics.mean(times[WARM_UP:]) / args.segment,
        "peak_mebibytes": peak_bytes(args) / 2**20,
        "growth": peak_bytes(args) / before - 1,
    }


def peak_bytes(args) -> int:
    return torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else resident_peak()


def run(args) -> list[dict]:
    """One row for each variant and length of the text, with medians over `repeats` processes."""
    found = {}
    for _ in range(args.repeats):
        for way in args.ways:
            for tokens in args.lengths:
                with multiprocessing.get_context("spawn").Pool(1) as fresh:
                    found.setdefault((way, tokens), []).append(fresh.apply(stream, (way, args, tokens)))
    return [merge(found[key], found[key[0], min(args.lengths)]) for key in sorted(found)]


def merge(runs: list[dict], shortest: list[dict]) -> dict:
    """The row with the medians of the repeats."""
    name = "microseconds_per_token"
    row = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "way"}
    row["over_shortest"] = statistics.median(a[name] / b[name] for a, b in zip(runs, shortest, strict=True))
    return {"way": runs[0]["way"]} | row


table = partial(markdown, formats=FORMATS)
