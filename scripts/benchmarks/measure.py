"""Measurements of the benchmarks: all variants interleaved in one process, ratios as medians of per-round ratios."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tnn_scripts.common.errors import markdown_table

import torch
from torch.autograd import DeviceType


def clock(args) -> float:
    """The CPU time of this thread if it is the only one, else the wall time after the device has finished."""
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.thread_time() if args.threads == 1 and args.device == "cpu" else time.perf_counter()


def measure(ways: dict[str, Callable[[], None]], args) -> dict[str, list[float]]:
    """The seconds of each variant in each of `args.repeats` rounds, after a round for warm-up."""
    times = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):
        for name, run in ways.items():
            start = clock(args)
            run()
            if repeat:
                times[name].append(clock(args) - start)
    return times


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def rows_of(times: dict[str, list[float]], tokens: int, bases: tuple[str, ...], **fields) -> list[dict]:
    """One row for each variant: milliseconds, tokens per second, and the speedup over each base."""
    return [
        fields
        | {"way": name, "milliseconds": 1000 * statistics.median(seconds)}
        | {"tokens_per_second": tokens / statistics.median(seconds)}
        | {f"{base}_over_this": ratio(times[base], seconds) for base in bases if base in times}
        for name, seconds in times.items()
    ]


def peak_on_device(run: Callable[[], None], args) -> dict[str, float]:
    """The additional peak memory of `run` on a GPU; none on a CPU."""
    if not args.device.startswith("cuda"):
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return {"peak_mebibytes": (torch.cuda.max_memory_allocated() - before) / 2**20}


def kernels_on_device(run: Callable[[], None], args) -> dict[str, int]:
    """The number of kernels that `run` launches on a GPU, one by one or in a CUDA graph."""
    if not args.device.startswith("cuda"):
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = (event for event in profile.events() if event.device_type == DeviceType.CUDA)
    return {"kernels": sum(not (e.is_user_annotation or e.name.startswith(("Memcpy", "Memset"))) for e in events)}


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
