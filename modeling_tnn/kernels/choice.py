"""The one place that chooses how a Toeplitz product is computed.

`tno_implementation` is a name, or `"auto"`: the Triton kernels on NVIDIA's GPUs of compute capability 8.0 and newer,
where they take the input and are the faster ones, else the fused product. What cannot run is replaced by the fused
product, with one line of warning. While a graph is exported or a function is transformed, all of them are `"eager"`.
A graph of torch.compile chooses when it runs (`compile/product.py`).
"""

from collections.abc import Callable

import torch
from transformers.utils import is_triton_available, logging

from ..extensions import extensions
from ..numerics import check_implementation, compute_dtype, is_on_host, must_be_eager
from ..toeplitz_fused import is_response
from .fallback import FAILED, PRODUCTS, is_recent_gpu, runs_on

logger = logging.get_logger(__name__)

# In float32 each product is three on the tensor cores. With more taps, counted on both sides, "auto" takes the fused
# product (measured on an H100: 0.96 to 1.47 times as fast as fused up to here, 0.38 to 0.84 beyond, for long inputs).
MOST_TAPS_OF_FLOAT32 = 512

# Limits of the Triton kernels: taps on both sides together, positions of all sequences (offsets in a channel have 32
# bits), and dtypes of inputs.
MOST_TAPS, MOST_POSITIONS, DTYPES = 2**12, 2**25, (torch.float32, torch.bfloat16, torch.float16)
MISSING = "needs the package triton, which is not installed (`pip install triton`, on Windows `triton-windows`)"


def choose(implementation: str, v: torch.Tensor, taps: int, dtype: torch.dtype) -> str:
    """The product of `v` `(B, L, D)` with filters of `taps` taps in `dtype`: "eager", "fused" or "triton"."""
    check_implementation(implementation)
    if implementation == "eager" or must_be_eager():
        return "eager"
    automatic, slower = implementation == "auto", v.dtype is torch.float32 and taps > MOST_TAPS_OF_FLOAT32
    if implementation == "fused" or (automatic and (is_on_host(v) or slower)):
        return "fused"
    reason = refused_by_triton(v, taps, dtype)
    if reason is None:
        logger.info_once(f"Toeplitz products are computed by 'triton' on {v.device}.")
        return "triton"
    # A failure of the kernels has been said when it happened.
    if PRODUCTS not in FAILED and (not automatic or (reason == MISSING and is_recent_gpu(v.device))):
        logger.warning_once(f"Toeplitz products are computed by 'fused' instead of 'triton', which {reason}.")
    return "fused"


def takes_taps(implementation: str, v: torch.Tensor, taps: int) -> bool:
    """Whether the product of `v` with filters of `taps` taps is computed from taps, and not from a response."""
    if extensions.keeps_products():  # the product is chosen when the graph runs, and taps serve all of them
        return implementation in ("auto", "triton") and not is_on_host(v)
    return choose(implementation, v, taps, compute_dtype(v.dtype)) == "triton"


def refused_by_triton(v: torch.Tensor, taps: int, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels refuse a product of `v` `(B, L, D)` with `taps` taps in `dtype`, or None."""
    if not is_triton_available():
        return MISSING
    if not runs_on(v.device):
        return f"needs a GPU of NVIDIA of compute capability 8.0 or newer, got {v.device}"
    if dtype is not torch.float32 or v.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {v.dtype} with a filter of {dtype}"
    if taps > MOST_TAPS:
        return f"takes at most {MOST_TAPS:,} taps, got {taps:,}"
    if v.shape[0] * v.shape[1] > MOST_POSITIONS:
        return f"takes at most {MOST_POSITIONS:,} positions, got {v.shape[0] * v.shape[1]:,}"
    return FAILED.get(PRODUCTS)


def kernel_product(implementation: str, v: torch.Tensor, kernel: torch.Tensor) -> Callable | None:
    """`tiled_convolution` where it computes the product of `v` `(B, L, D)` with taps `(D, K)` or a response."""
    if is_response(kernel) or v.numel() == 0 or choose(implementation, v, kernel.shape[1], kernel.dtype) != "triton":
        return None
    from .triton import tiled_convolution

    return tiled_convolution


extensions.register(takes_taps=takes_taps)
