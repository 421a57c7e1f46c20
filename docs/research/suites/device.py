"""Measurements on a device: milliseconds, kernels and memory of a function or a process, times of new tokens."""

import gc
import statistics
import sys
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from transformers.generation.streamers import BaseStreamer

from tnn_programs.benchmarks.measure import clock, measure


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


def resident_peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
