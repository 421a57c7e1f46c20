"""The product of the Triton kernels with bfloat16 inputs, simulated where all numbers are float64."""

import torch

from modeling_tnn.numerics import next_fast_len
from modeling_tnn.toeplitz_fused import NO_GATE, Gate, Windows, eager_windows


def by_operations(v: torch.Tensor, kernel: torch.Tensor, first: int) -> torch.Tensor:
    """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel` `(D, K)`."""
    size = next_fast_len(v.shape[1] + max(first, kernel.shape[1] - 1 - first))
    windows = Windows(size, size, skip=first)
    return eager_windows(v.permute(2, 0, 1), kernel, None, None, None, windows).permute(1, 2, 0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` with the numbers that bfloat16 has."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate = NO_GATE) -> torch.Tensor:
    """As `kernels.triton.tiled_convolution`: inputs, activated inputs, taps and result are rounded, sums are not."""
    x = rounded(gate.inputs(rounded(v)))
    y = by_operations(x, rounded(kernel), first)
    return rounded(y if gate.u is None else gate.act(rounded(gate.u)) * y)
