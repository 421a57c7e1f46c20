"""Measurements of the benchmarks: all variants interleaved in one process, ratios as medians of per-round ratios."""

import gc
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch.autograd import DeviceType
from transformers.generation.streamers import BaseStreamer

from tnn_programs.cli.model_path import check_device
from tnn_programs.cli.tables import markdown_table


def measured(suite: ModuleType, args) -> dict:
    """The settings and versions of a suite, and its rows."""
    args.device = check_device(args.device)
    torch.set_num_threads(args.threads)
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    return {"settings": settings, "versions": versions, "rows": suite.run(args)}


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


def timed(make: Callable[[], Callable[[], object]], args, warm_up: int = 3) -> dict:
    """The milliseconds of what `make` returns, and on a GPU its kernels and peak memory; its error if it fails.

    Compilers compile in the first of the calls for warm-up, CUDA graphs are recorded in the next ones.
    """
    torch._dynamo.reset()
    if args.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
    try:
        run = make()
        for _ in range(warm_up):
            run()
        milliseconds = 1000 * statistics.median(measure({"": run}, args)[""])
        return {"milliseconds": milliseconds} | kernels_on_device(run, args) | peak_on_device(run, args)
    except Exception as error:  # a row of the table; the other ways go on
        return {"error": noted(error)}


def noted(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Stopwatch(BaseStreamer):
    """The times at which a text was submitted and got its tokens."""

    def __init__(self, args):
        self.args, self.times = args, []

    def put(self, value: torch.Tensor):
        """Take note of the time: of the prompt, or of a token."""
        self.times.append(clock(self.args))

    def end(self):
        """Nothing is left to do."""


def markdown(rows: list[dict], formats: dict[str, str]) -> str:
    """A table of the columns that `formats` names and any row has a value for."""
    columns = [name for name in formats if any(row.get(name) is not None for row in rows)]
    lines = ([None if row.get(name) is None else format(row[name], formats[name]) for name in columns] for row in rows)
    texts = sum(formats[name] == "" for name in columns)
    return markdown_table([name.replace("_", " ") for name in columns], lines, texts)
