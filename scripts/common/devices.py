"""Devices: a check of their names, and errors for a lack of memory that name the options that help."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tnn_scripts.common.errors import UserError

import torch


def check_device(name: str | None) -> str:
    """The name of a device, for a command line: the accelerator if there is one, else the CPU, unless given.

    Raises:
        ValueError: the name is not that of a device, or this machine does not have it.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be a device of this machine, got {name}: {reason}") from error
    return name


class MemoryExceededError(UserError):
    """The error for a lack of memory. Its message names options that help."""


@contextmanager
def suggest_smaller(what: str, advice: str) -> Iterator[None]:
    """Turn all errors of failed allocations into one, whose message names options that help.

    Raises:
        MemoryExceededError: the machine or an accelerator ran out of memory in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise MemoryExceededError(f"There is not enough memory for {what}: {advice} ({first_line}).") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation. Some libraries below PyTorch have messages of their own."""
    from accelerate.utils.memory import should_reduce_batch_size  # not installed with the package alone

    return (
        isinstance(error, MemoryError)
        or should_reduce_batch_size(error)
        or any(text in str(error) for text in ("bad_alloc", "MKL FFT error"))
    )


def reserved_memory(device: torch.device) -> float | None:
    """The most memory of a GPU in GiB that PyTorch has taken so far, CUDA graphs included; None for other devices."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


def resident_peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
