"""Devices: which one a program uses, and errors for one that runs out of memory, in terms of options that help."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tnn_scripts.common.errors import UserError

import torch
from accelerate.utils.memory import should_reduce_batch_size


def check_device(name: str) -> str:
    """The name of a device, for a command line.

    Raises:
        ValueError: it is none, or this machine has none such.
    """
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={name!r} is not possible: {str(error).splitlines()[0]}.") from error
    return name


class MemoryExceededError(UserError):
    """There is not enough memory for what was asked for."""


@contextmanager
def suggest_smaller(what: str, advice: str) -> Iterator[None]:
    """Give the errors of an allocation one type and a message that names options.

    Raises:
        MemoryExceededError: the block ran out of memory, of the machine or of an accelerator.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise MemoryExceededError(f"There is not enough memory for {what}: {advice} ({first_line})") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. Some libraries below PyTorch say so in other words than it does."""
    return (
        isinstance(error, MemoryError)
        or should_reduce_batch_size(error)
        or any(text in str(error) for text in ("bad_alloc", "MKL FFT error"))
    )


def resident_peak() -> int:
    """The largest size of this process so far, in bytes."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
