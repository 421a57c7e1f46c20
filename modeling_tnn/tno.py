"""The contract of a Toeplitz neural operator (TNO): one Toeplitz matrix per channel, applied along the sequence.

    y_i = sum_j t_{i-j} v_j

B batch, L length, D channels. A variant says where the coefficients t come from. It is one file, one line in
`operators.py` and one name in `configuration_tnn.py`; every test over the table of operators then covers it.
"""

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from .toeplitz import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul, two_sided


class ToeplitzOperator(nn.Module):
    """Base class of the operators. A variant defines `coefficients` and `reset_parameters`.

    Attributes:
        causal: whether t_k = 0 for k < 0.
        channels: D.
        shift_invariant: whether `forward` commutes with a shift of the sequence; if not, sequences are aligned
            to their first real token before it.
    """

    shift_invariant = True

    def __init__(self, config):
        super().__init__()
        self.causal = config.causal
        self.channels = config.gtu_dim

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The coefficients for a sequence of `length` positions, independent of the batch.

        Args:
            device: where to compute them if not where the parameters are, which an offloaded model only brings
                there for the time they are used.

        Returns:
            causal: `(D, L)`, the lags 0 .. L-1; the first m of them are the same for every length >= m.
            bidirectional: `(D, 2L - 1)`, the lags -(L-1) .. L-1.
        """
        raise NotImplementedError

    def reset_parameters(self):
        """Initialise the parameters that the operator itself owns (those of its submodules excluded)."""

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`, in float32 at least inside, whatever autocast says."""
        with maybe_autocast(device_type=v.device.type, enabled=False):
            return self.mix(v)

    def mix(self, v: torch.Tensor) -> torch.Tensor:
        """The product itself; overridden where a variant has a faster way than through its coefficients."""
        product = causal_toeplitz_matmul if self.causal else toeplitz_matmul
        return product(v, self.coefficients(v.shape[1], v.device))

    def dense(self, length: int) -> torch.Tensor:
        """The oracle of `forward`: its matrices, `(D, L, L)`, row i and column j as in the equation above."""
        coefficients = self.coefficients(length)
        return dense_toeplitz(two_sided(coefficients) if self.causal else coefficients)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, causal={self.causal}"
