"""The Triton product as a layer of a Hub kernel. `kernelize` lets it compute in the place of `tno.ToeplitzProduct`.

No model imports this file: `tnn hub-kernel` writes it to a folder with the files that it imports. They need PyTorch
and Triton alone.
"""

import torch
from torch import nn

from .gating import Gate
from .numerics import must_be_eager
from .toeplitz_triton import gated_tiles, refused


class ToeplitzProduct(nn.Module):
    """The gated convolution by the Triton kernels. What they do not take, the class of the model computes.

    In a graph of torch.compile or torch.export that is the same operator as without a kernel of the Hub.
    """

    has_backward = True
    can_torch_compile = False

    def forward(self, v: torch.Tensor, kernel: torch.Tensor, first: int, implementation: str, gate: tuple):
        """Entries `first .. first + L - 1` of the convolution of `v` `(B, L, D)` with `kernel` `(D, K)`.

        Args:
            implementation: how the class of the model computes.
            gate: u `(B, L, D)`, the activation of u and v, and the mask `(B, L)`; None where there is none.
        """
        if must_be_eager() or v.numel() == 0 or refused(v, kernel.shape[1], kernel.dtype) is not None:
            return type(self).forward(self, v, kernel, first, implementation, gate)
        return gated_tiles(v, kernel, first, Gate(*gate))
