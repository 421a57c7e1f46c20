"""Many texts at once by `BatchScheduler`, compared with `generate` for one after the other.

Both ways write the same number of tokens after the same prompts, greedily. Each repeat measures `generate` for a part
of the texts before each batch. Texts come all at once, or in turn: twice as many, at equal distances, so that one ends
for each that comes once all rows are taken.

The time to the first token is that from `submit`; tokens follow each other by the step of all texts.
"""

from functools import partial
from statistics import median, quantiles

import torch
from suites.device import Stopwatch
from suites.peers import FIELDS, sizes

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.modeling_tnn import TnnForCausalLM
from modeling_tnn.serving.rows import bytes_of_text
from modeling_tnn.serving.scheduler import BatchScheduler
from tnn_programs.benchmarks.measure import clock, markdown, ratio

FORMATS = {"model": "", "arrivals": "", "tokens_per_launch": "", "alone_tokens_per_second": ".0f"}
FORMATS |= {"tokens_per_second": ".0f", "over_alone": ".2f", "first_token_ms": ".0f", "first_token_ms_p99": ".0f"}
FORMATS |= {"token_ms": ".0f", "token_ms_p99": ".0f", "state_mebibytes": ".1f"}


def prompts_of(args) -> list[torch.Tensor]:
    least, most = args.prompts
    lengths = torch.linspace(least, most, args.requests).long()[torch.randperm(args.requests)].tolist()
    return [torch.randint(args.vocab_size, (1, length), device=args.device) for length in lengths]


def options_of(args) -> dict:
    return {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None}


def alone(model, prompts: list[torch.Tensor], args) -> float:
    """The tokens per second of `generate`."""
    start = clock(args)
    for prompt in prompts:
        model.generate(prompt, **options_of(args))
    return len(prompts) * args.new_tokens / (clock(args) - start)


def together(model, waiting: list[torch.Tensor], between: int, most: int, args) -> tuple[float, list[Stopwatch]]:
    """The tokens per second of the scheduler if a prompt comes every `between` tokens, and the times of the texts.

    A step writes at most `most` tokens of each text.
    """
    scheduler = BatchScheduler(model, max_batch_size=args.requests, tokens_per_launch=most)
    watches, count = [], len(waiting)
    start, steps = clock(args), 0
    while waiting or scheduler.has_work:
        while waiting and steps >= between * len(watches):
            watches.append(Stopwatch(args))
            scheduler.submit(waiting.pop(0), streamer=watches[-1], **options_of(args))
        scheduler.step()
        steps += most
    return count * args.new_tokens / (clock(args) - start), watches


def run(args) -> list[dict]:
    """One row for each model and way of arriving, with medians over the repeats."""
    torch.manual_seed(0)
    prompts, rows = prompts_of(args), []
    part = prompts[:: max(1, args.requests // args.alone)][: args.alone]
    arrivals = {"at once": (prompts, 0), "in turn": (prompts * 2, max(1, args.new_tokens // args.requests))}
    for name in args.models:
        torch.manual_seed(0)
        config = TnnConfig(hidden_size=args.hidden_size, **sizes(args), **FIELDS[name])
        model = TnnForCausalLM(config).eval().to(args.device)
        alone(model, part[:1], args)
        found = {(way, most): [] for way in arrivals for most in args.tokens_per_launch}
        for way, most in (*found, *found) if "cuda" in args.device else ():  # graphs are recorded in the first texts
            together(model, [*arrivals[way][0]], arrivals[way][1], most, args)
        for _ in range(args.repeats):
            for (way, most), measured in found.items():
                texts, between = arrivals[way]
                measured.append((alone(model, part, args), *together(model, [*texts], between, most, args)))
        state = bytes_of_text(model.get_decoder(), args.prompts[1] + args.new_tokens) / 2**20
        rows += [row(name, *key, *zip(*repeats, strict=True), state) for key, repeats in found.items()]
    return rows


def row(name: str, arrivals: str, most: int, one: tuple, together: tuple, watches: tuple, state: float) -> dict:
    """The figures of a model; the percentiles are over all texts, or tokens, of all repeats."""
    times = [watch.times for repeat in watches for watch in repeat]
    waits = {"first_token_ms": [1000 * (one[1] - one[0]) for one in times]}
    waits["token_ms"] = [1000 * (b - a) for one in times for a, b in zip(one[1:], one[2:], strict=False)]
    found = {"model": name, "arrivals": arrivals, "tokens_per_launch": most, "alone_tokens_per_second": median(one)}
    found |= {"tokens_per_second": median(together), "over_alone": ratio(together, one), "state_mebibytes": state}
    for key, milliseconds in waits.items():
        found |= {key: median(milliseconds), f"{key}_p99": quantiles(milliseconds, n=100, method="inclusive")[98]}
    return found


table = partial(markdown, formats=FORMATS)
