"""Measurements of the benchmarks: all variants interleaved in one process, ratios as medians of per-round ratios."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from tnn_programs.cli.tables import markdown_table


def clock(args) -> float:
    """The CPU time of this thread if it is the only one, else the wall time after the device has finished."""
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.thread_time() if args.threads == 1 and args.device == "cpu" else time.perf_counter()


def measure(ways: dict[str, Callable[[], None]], args, turns: int = 1) -> dict[str, list[float]]:
    """The seconds of each variant in each of `args.repeats` rounds, or `turns` rounds, after one for warm-up."""
    times = {name: [] for name in ways}
    for repeat in range(args.repeats * turns + 1):
        for name, run in ways.items():
            start = clock(args)
            run()
            if repeat:
                times[name].append(clock(args) - start)
    return times


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def autocast(args, enabled: bool = True) -> AbstractContextManager:
    """Autocast in bfloat16 where the device has it: the meta device, on which tests build all, has not."""
    kind = torch.device(args.device).type
    return torch.autocast(kind, torch.bfloat16, enabled) if torch.amp.is_autocast_available(kind) else nullcontext()


def markdown(rows: list[dict], formats: dict[str, str]) -> str:
    """A table of the columns that `formats` names and any row has a value for."""
    columns = [name for name in formats if any(row.get(name) is not None for row in rows)]
    lines = ([None if row.get(name) is None else format(row[name], formats[name]) for name in columns] for row in rows)
    texts = sum(formats[name] == "" for name in columns)
    return markdown_table([name.replace("_", " ") for name in columns], lines, texts)
