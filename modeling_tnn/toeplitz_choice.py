"""The one place that chooses how a Toeplitz product is computed.

`tno_implementation` is a name, or `"auto"`: what was measured to be the fastest on the device, and the fused product
where nothing was (`toeplitz_measured.py`). What cannot run is replaced by the fused product, with one line of warning.
While a graph is exported or a function is transformed, all of them are `"eager"`. A graph of torch.compile chooses
when it runs (`toeplitz_recorded.py`).
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from transformers.utils import logging

from .gating import Gate
from .numerics import check_implementation, compute_dtype, is_on_host, must_be_eager
from .toeplitz_cudnn import ANY_LENGTH_TAPS, DEVICES, MOST_ENTRIES, NEEDS, CudnnConvolution, cudnn_function
from .toeplitz_measured import MEASURED

logger = logging.get_logger(__name__)


def choose(implementation: str, v: torch.Tensor, taps: int, dtype: torch.dtype) -> str:
    """The product of `v` `(B, L, D)` with filters of so many `taps` in `dtype`: "eager", "fused", "cudnn" or "triton".

    Raises:
        ValueError: `implementation` is unknown.
    """
    check_implementation(implementation)
    if implementation == "eager" or must_be_eager():
        return "eager"
    if implementation == "auto":
        implementation = fastest(v, taps)
    if implementation == "fused":
        return "fused"
    reason = REFUSALS[implementation](v, taps, dtype)
    if reason is None:
        return implementation
    logger.warning_once(f"Toeplitz products are computed by 'fused' instead of {implementation!r}, which {reason}.")
    return "fused"


def takes_taps(implementation: str, v: torch.Tensor, taps: int) -> bool:
    """Whether the product of `v` with filters of so many `taps` is computed from taps, and not from a response."""
    return choose(implementation, v, taps, compute_dtype(v.dtype)) in KERNELS


def fastest(v: torch.Tensor, taps: int) -> str:
    """The implementation that was measured to be the fastest for `v` and so many `taps`."""
    if is_on_host(v):
        return "fused"
    name = str(v.dtype).removeprefix("torch.")
    fitting = (row for row in MEASURED.get(device_name(v.device), ()) if row.dtype == name and taps <= row.taps)
    return next((row.implementation for row in fitting), "fused")


@lru_cache
def device_name(device: torch.device) -> str:
    """What devices of one kind are called in the table: `"sm_90"` for NVIDIA's GPUs, else the type."""
    if device.type != "cuda" or torch.version.hip:
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def describe(implementation: str, device: torch.device) -> str:
    """An implementation, and for `"auto"` what it takes on a device."""
    if implementation != "auto":
        return implementation
    name = device_name(device)
    taken = [f"{row.implementation} to {row.taps:,} taps in {row.dtype}" for row in MEASURED.get(name, ())]
    return f"auto ({', '.join([*taken, 'else fused' if taken else 'fused'])} on {name})"


def refused_by_triton(v: torch.Tensor, taps: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot compute a product, or None."""
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    from .toeplitz_triton import refused

    return refused(v, taps, dtype)


def refused_by_cudnn(v: torch.Tensor, taps: int, dtype: torch.dtype) -> str | None:
    """Why cuDNN cannot compute a product, or None."""
    if cudnn_function() is None:
        return f"needs {NEEDS}, which is not installed"
    if v.device.type not in DEVICES:
        return f"needs a GPU of NVIDIA, got {v.device}"
    if dtype is torch.float64 and v.dtype is not torch.float64:
        return f"computes in the dtype of the inputs, {v.dtype}, got a filter of {dtype}"
    if taps > ANY_LENGTH_TAPS and v.shape[1] + taps > MOST_ENTRIES:
        return f"takes at most {MOST_ENTRIES:,} taps and positions, got {taps:,} and {v.shape[1]:,}"
    return None


REFUSALS = {"triton": refused_by_triton, "cudnn": refused_by_cudnn}


def triton_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate) -> torch.Tensor:
    """The gated convolution by the Triton kernels."""
    from .toeplitz_triton import gated_tiles

    return gated_tiles(v, kernel, first, gate)


def cudnn_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate) -> torch.Tensor:
    """The gated convolution around that of cuDNN."""
    return gate.apply(CudnnConvolution.apply(gate.inputs(v), kernel, first), "fused")


# From a name to a product of `v` `(B, L, D)` with `kernel` `(D, K)`: entries first .. first + L - 1, inside a gate.
KERNELS = {"triton": triton_product, "cudnn": cudnn_product}
