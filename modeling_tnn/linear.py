"""Linear maps whose result lies in memory channel by channel, so that what runs along the sequence finds it at hand.

    y = W x + b

N tokens (all of B sequences of L), d inputs, D outputs. The result has the shape of `torch.nn.Linear`, `(..., D)`, as
the transposed view of a `(D, N)` matrix: W x^T costs what x W^T does, while a Toeplitz product on `(N, D)` memory
spends more time in strided copies than in transforms (measured: half of it).
"""

import torch
from torch import nn

from .tracing import is_traced


class ChannelMajorLinear(nn.Linear):
    """`torch.nn.Linear` in values and gradients; only the strides of the result differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., L, d)` to `(..., L, D)`."""
        # A quantised or sharded weight is a tensor class that knows `linear` alone; one token has no sequence.
        if is_traced() or x.shape[-2] == 1 or type(self.weight.data) is not torch.Tensor:
            return super().forward(x)
        columns = x.reshape(-1, self.in_features).t()  # (d, N)
        y = torch.addmm(self.bias[:, None], self.weight, columns)  # (D, N)
        return y.t().view(*x.shape[:-1], self.out_features)
