"""The product of the Triton kernels with bfloat16 inputs, simulated where all numbers are float64."""

import torch

from modeling_tnn.gating import NO_GATE, Gate
from modeling_tnn.toeplitz_cudnn import by_operations


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` with the numbers that bfloat16 has."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_product(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate = NO_GATE) -> torch.Tensor:
    """As `toeplitz_choice.triton_product`: inputs, activated inputs, taps and result are rounded, sums are not."""
    x = rounded(gate.inputs(rounded(v)))
    y = by_operations(x, rounded(kernel), first)
    return rounded(y if gate.u is None else gate.act(rounded(gate.u)) * y)
