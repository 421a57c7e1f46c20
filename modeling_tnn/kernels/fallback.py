"""Kernels that a machine may be unable to run. The first failure is said once, and others compute from then on.

A Triton kernel is compiled when it is first launched. That needs a C compiler, a driver that fits, and a GPU with
enough shared memory.
"""

import logging
import os
from collections.abc import Callable
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

# The kernels of `triton.py`, by the name that begins the warning.
PRODUCTS = "The Triton kernels of Toeplitz products"

# From the name of kernels to the reason why they are not used any more in this process.
FAILED: dict[str, str] = {}


def attempt(kernels: str, compute: Callable, instead: Callable):
    """`compute()` by the kernels of this name, or `instead()` once they have failed. A lack of memory is raised."""
    if kernels not in FAILED:
        try:
            return compute()
        except Exception as error:  # compilers, drivers and loaders have many
            # Errors of Triton's interpreter, and during the capture of a CUDA graph, say nothing about the kernels.
            captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if isinstance(error, torch.OutOfMemoryError) or is_interpreted() or captured:
                raise
            FAILED[kernels] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            logger.warning("%s do not run here, and others compute instead of them: %s", kernels, FAILED[kernels])
    return instead()


def runs_on(device: torch.device) -> bool:
    """Whether our Triton kernels are made for a device, where triton is installed."""
    return is_recent_gpu(device) or (device.type == "cpu" and is_interpreted())


@lru_cache
def is_recent_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU of NVIDIA of compute capability 8.0 or newer."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def is_interpreted() -> bool:
    """Whether Triton's interpreter computes, on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
