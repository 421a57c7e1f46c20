"""Several processes with gloo on the CPU: started once for many cases, each of which is a function of its rank."""

import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock
from torch.distributed.tensor import DTensor

from helpers import processes
from helpers.scripts import free_port

# Seconds that a process waits for another, and that all cases together may take.
# The second is for a machine that runs much else: one that hangs has ended by the first.
PATIENCE, LONGEST = 40, 300


def start(world: int, slow: bool = False) -> dict[str, dict]:
    """The results of rank 0 of so many processes that run `helpers.parallel_ranks`, by the names of the cases.

    A process that fails, or one that hangs, ends all of them.

    Args:
        slow: all cases, and not those of the usual tests.

    Raises:
        AssertionError: a process has failed, with its status and the end of what it has printed.
    """
    results, error = _outcome(world, slow)
    assert error is None, error
    return results


@functools.cache
def _outcome(world: int, slow: bool) -> tuple[dict[str, dict], str | None]:
    """Started once for all tests of all processes of pytest, also if it fails."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _started(world, slow)
    file = Path(os.environ["FOLDER_OF_THE_RUN"]) / f"ranks-{world}{'-slow' * slow}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(_started(world, slow)))
    return tuple(json.loads(file.read_text()))


def _started(world: int, slow: bool, again: bool = True) -> tuple[dict[str, dict], str | None]:
    """Once more, with a warning, after a signal: a thread of gloo has had a segmentation fault, once in many runs."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "LOCAL_WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "helpers.parallel_ranks", *["--slow"] * slow]
    folder = tempfile.TemporaryDirectory()  # of all that the processes save
    shared |= {"TMPDIR": folder.name}
    started = [
        processes.Process(command, os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        deadline = time.monotonic() + LONGEST * (3 if slow else 1)
        while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
            if time.monotonic() > deadline:
                return {}, f"too slow, or hanging: {[one.output()[1][-2000:] for one in started]}"
            time.sleep(0.02)
        failed = [f"status {one.returncode}: {one.output()[1][-4000:]}" for one in started if one.returncode]
        if again and any((one.returncode or 0) < 0 for one in started):
            warnings.warn(failed[0], stacklevel=2)
            return _started(world, slow, again=False)
        return ({}, failed[0]) if failed else (json.loads(started[0].output()[0].splitlines()[-1]), None)
    finally:
        for one in started:
            one.__exit__()
        folder.cleanup()


def run(cases: dict[str, Callable[[], dict]]):
    """What a process of `start` does: all cases, and their results as the last line of its output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    found = {name: case() for name, case in cases.items()}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be divided over the processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(errors: list[float]) -> float:
    """The largest of the errors of all processes."""
    message = torch.tensor(max(errors), dtype=torch.float64)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    return message.item()
