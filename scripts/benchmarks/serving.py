"""Many texts at once by `BatchScheduler`, compared with `generate` for one after the other.

Both ways write the same number of tokens after the same prompts, greedily. Each repeat measures `generate` for a part
of the texts before and after the batch. Texts come all at once, or in turn: twice as many, at equal distances, so that
one ends for each that comes once all rows are taken.

The time to the first token is that from `submit`; tokens follow each other by the step of all texts.
"""

import statistics
from functools import partial

import torch
from transformers.generation.streamers import BaseStreamer

from modeling_tnn import BatchScheduler, TnnConfig, TnnForCausalLM
from modeling_tnn.serving.rows import bytes_of_text
from tnn_scripts.benchmarks.measure import clock, markdown
from tnn_scripts.benchmarks.peers import FIELDS, sizes

ARRIVALS = ("at once", "in turn")
FORMATS = {"model": "", "arrivals": "", "alone_tokens_per_second": ".0f", "tokens_per_second": ".0f"}
FORMATS |= {"over_alone": ".2f", "first_token_ms": ".0f", "first_token_ms_p99": ".0f"}
FORMATS |= {"token_ms": ".0f", "token_ms_p99": ".0f", "state_mebibytes": ".1f"}


class Stopwatch(BaseStreamer):
    """The seconds at which a text was submitted and got its tokens."""

    def __init__(self, args):
        self.args, self.times = args, []

    def put(self, value):
        """The prompt, or a token."""
        self.times.append(clock(self.args))

    def end(self):
        """Nothing is left to do."""


def prompts_of(args) -> list[torch.Tensor]:
    least, most = args.prompts
    lengths = torch.linspace(least, most, args.requests).long()[torch.randperm(args.requests)].tolist()
    return [torch.randint(args.vocab_size, (1, length), device=args.device) for length in lengths]


def alone(model, prompts: list[torch.Tensor], args) -> float:
    """The tokens per second of `generate`."""
    start = clock(args)
    for prompt in prompts:
        model.generate(prompt, **options_of(args))
    return len(prompts) * args.new_tokens / (clock(args) - start)


def together(model, prompts: list[torch.Tensor], arrivals: str, args) -> tuple[float, list[Stopwatch]]:
    """The tokens per second of the scheduler, and the times of the texts."""
    scheduler, watches = BatchScheduler(model, max_batch_size=args.requests), []
    at_once = arrivals == "at once"
    waiting = list(prompts) if at_once else prompts * 2
    count, between = len(waiting), 0 if at_once else max(1, args.new_tokens // args.requests)
    start, steps = clock(args), 0
    while waiting or scheduler.has_work:
        while waiting and steps >= between * len(watches):
            watches.append(Stopwatch(args))
            scheduler.submit(waiting.pop(0), streamer=watches[-1], **options_of(args))
        scheduler.step()
        steps += 1
    return count * args.new_tokens / (clock(args) - start), watches


def options_of(args) -> dict:
    return {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None}


def run(args) -> list[dict]:
    """One row for each model and way of arriving, with medians over the repeats."""
    torch.manual_seed(0)
    prompts, rows = prompts_of(args), []
    part = prompts[:: max(1, args.requests // args.alone)][: args.alone]
    for name in args.models:
        torch.manual_seed(0)
        config = TnnConfig(hidden_size=args.hidden_size, **sizes(args), **FIELDS[name])
        model = TnnForCausalLM(config).eval().to(args.device)
        alone(model, part[:1], args)
        found = {arrivals: ([], [], []) for arrivals in ARRIVALS}
        for _ in range(args.repeats):
            before = alone(model, part, args)
            for arrivals in ARRIVALS:
                speed, watches = together(model, prompts, arrivals, args)
                after = alone(model, part, args)
                for place, one in zip(found[arrivals], ((before + after) / 2, speed, watches), strict=True):
                    place.append(one)
                before = after
        state = bytes_of_text(model.get_decoder(), args.prompts[1] + args.new_tokens)
        rows += [row(name, arrivals, *figures, state) for arrivals, figures in found.items()]
    return rows


def row(name: str, arrivals: str, one: list[float], all_: list[float], watches: list, state: int) -> dict:
    """The figures of a model; the percentiles are over all texts, or tokens, of all repeats."""
    times = [watch.times for repeat in watches for watch in repeat]
    first = [1000 * (one[1] - one[0]) for one in times]
    steps = [1000 * (b - a) for one in times for a, b in zip(one[1:], one[2:], strict=False)]
    return {
        "model": name,
        "arrivals": arrivals,
        "alone_tokens_per_second": statistics.median(one),
        "tokens_per_second": statistics.median(all_),
        "over_alone": statistics.median(a / b for a, b in zip(all_, one, strict=True)),
        "first_token_ms": statistics.median(first),
        "first_token_ms_p99": percentile(first),
        "token_ms": statistics.median(steps),
        "token_ms_p99": percentile(steps),
        "state_mebibytes": state / 2**20,
    }


def percentile(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


table = partial(markdown, formats=FORMATS)
