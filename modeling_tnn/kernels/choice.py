"""The one place that chooses how a Toeplitz product is computed.

`tno_implementation` is a name, or `"auto"`: the Triton kernels on NVIDIA's GPUs of compute capability 8.0 and newer,
where they take the input and are the faster ones, else the fused product. What cannot run is replaced by the fused
product, with one line of warning. While a graph is exported or a function is transformed, all of them are `"eager"`.
A graph of torch.compile chooses when it runs (`compile/product.py`).
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from transformers.utils import logging

from ..extensions import extensions
from ..numerics import check_implementation, compute_dtype, is_on_host, must_be_eager
from ..toeplitz_fused import Gate, is_response
from .fallback import FAILED, is_recent_gpu

logger = logging.get_logger(__name__)

# In float32 each product is three on the tensor cores. With more taps, counted on both sides, "auto" takes the fused
# product (measured on an H100: 0.96 to 1.47 times as fast as fused up to here, 0.38 to 0.84 beyond, for long inputs).
MOST_TAPS_OF_FLOAT32 = 512

MISSING = "needs the package triton, which cannot be imported (`pip install triton`, on Windows `triton-windows`)"


def choose(implementation: str, v: torch.Tensor, taps: int, dtype: torch.dtype) -> str:
    """The product of `v` `(B, L, D)` with filters of so many `taps` in `dtype`: "eager", "fused" or "triton".

    Raises:
        ValueError: `implementation` is unknown.
    """
    check_implementation(implementation)
    if implementation == "eager" or must_be_eager():
        return "eager"
    automatic = implementation == "auto"
    if implementation == "fused" or (automatic and (is_on_host(v) or prefers_fused(v, taps))):
        return "fused"
    reason = refused_by_triton(v, taps, dtype)
    if reason is None:
        logger.info_once(f"Toeplitz products are computed by 'triton' on {v.device}.")
        return "triton"
    said = reason in FAILED.values()  # when they failed
    if not said and (not automatic or (reason == MISSING and is_recent_gpu(v.device))):
        logger.warning_once(f"Toeplitz products are computed by 'fused' instead of 'triton', which {reason}.")
    return "fused"


def prefers_fused(v: torch.Tensor, taps: int) -> bool:
    """Whether the fused product is faster than the Triton kernels on a GPU that has both."""
    return v.dtype is torch.float32 and taps > MOST_TAPS_OF_FLOAT32


def takes_taps(implementation: str, v: torch.Tensor, taps: int) -> bool:
    """Whether the product of `v` with filters of so many `taps` is computed from taps, and not from a response."""
    if extensions.keeps_products():  # the product is chosen when the graph runs, and taps serve all of them
        return implementation in ("auto", "triton") and not is_on_host(v)
    return choose(implementation, v, taps, compute_dtype(v.dtype)) == "triton"


def describe(implementation: str, device: torch.device) -> str:
    """An implementation, and for `"auto"` what it takes on a device, and what is missing there."""
    if implementation != "auto":
        return implementation
    if not is_recent_gpu(device):
        return f"auto (fused on {device.type})"
    reason = refused_by_triton(torch.empty(0, 0, 0, device=device), 1, torch.float32)
    if reason is not None:
        return f"auto (fused on {device.type}: triton {reason})"
    return f"auto (triton on {device.type}, to {MOST_TAPS_OF_FLOAT32} taps in float32, else fused)"


def refused_by_triton(v: torch.Tensor, taps: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot compute a product, or None."""
    if not has_triton():
        return MISSING
    from .triton import refused

    return refused(v, taps, dtype)


@lru_cache
def has_triton() -> bool:
    """Whether the kernels can be imported."""
    try:
        from .triton import refused  # noqa: F401
    except ImportError:
        return False
    return True


def kernel_product(implementation: str, v: torch.Tensor, kernel: torch.Tensor) -> Callable | None:
    """The kernels that compute the product of `v` `(B, L, D)` with taps `(D, K)` or a response, as a function.

    It has the arguments of `triton_product`. None for the eager and the fused product.
    """
    if is_response(kernel) or v.numel() == 0 or choose(implementation, v, kernel.shape[1], kernel.dtype) != "triton":
        return None
    return triton_product


def triton_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel` `(D, K)`, inside a gate."""
    from .triton import tiled_convolution

    return tiled_convolution(v, kernel, first, gate)


extensions.register(describe_product=describe, takes_taps=takes_taps)
