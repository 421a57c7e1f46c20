"""The contract of a Toeplitz neural operator (TNO): one Toeplitz matrix per channel, applied along the sequence.

    y_i = sum_j t_{i-j} v_j

B batch, L length, D channels. A variant says where the coefficients t come from. It is one file, one line in
`operators.py` and one name in `configuration_tnn.py`; every test over the table of operators then covers it.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .gating import Gating
from .recurrence import FilterRecurrence, Recurrence
from .toeplitz import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul, two_sided
from .tracing import is_traced


class ToeplitzOperator(nn.Module):
    """Base class of the operators. A variant defines `coefficients`, and `num_taps` and `reset_parameters` if need be.

    Attributes:
        causal: whether t_k = 0 for k < 0.
        channels: D.
        layer_idx: which layer of the model it is in.
        shift_invariant: whether `forward` commutes with a shift of the sequence; if not, sequences are aligned
            to their first real token before it.
    """

    shift_invariant = True

    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        self.layer_idx = layer_idx
        self.stagger = layer_idx / config.num_hidden_layers
        self.causal = config.causal
        self.product = config.product
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

    def recurrence(self) -> Recurrence:
        """How to decode the operator token by token, with its parameters as they are now.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        return FilterRecurrence(self, self.num_taps(), self.stagger)

    def require_causal(self):
        """Raise the ValueError of an operator that cannot decode."""
        if not self.causal:
            raise ValueError("causal=False is not possible: only a causal operator has a recurrence.")

    def num_taps(self) -> int | None:
        """How many taps a causal kernel has in the precision of its parameters; None without a bound."""
        return None

    def slowest_decay(self) -> float | None:
        """The largest decay rate of all channels, for a kernel that has one."""
        return None

    def poles(self, most: int = 64) -> torch.Tensor | None:
        """Poles of at most `most` kernels, complex `(most, N)`; None for a kernel that is not a recurrence."""
        return None

    def reset_parameters(self):
        """Initialise the parameters that the operator itself owns (those of its submodules excluded)."""

    def forward(
        self, v: torch.Tensor, past_key_values: Cache | None = None, gating: Gating | None = None
    ) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`, in float32 at least inside, whatever autocast says.

        With a cache, `v` continues the sequences that the cache has seen. With a gating, `v` is what comes before
        its activation, and the result is gated.
        """
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if past_key_values is None:
                return self.mix(v, gating)
            # In here, since the weights of an offloaded model are at hand only while their module runs.
            return past_key_values.update(v, None, self.layer_idx, self, gating)[0]

    def mix(self, v: torch.Tensor, gating: Gating | None = None) -> torch.Tensor:
        """The product itself; overridden where a variant has a faster way than through its coefficients."""
        matmul = causal_toeplitz_matmul if self.causal else toeplitz_matmul
        length, reach = v.shape[1], self.reach()
        # A traced graph keeps all lags: it serves any length.
        if reach is not None and not is_traced():
            length = min(length, reach)
        return matmul(v, self.coefficients(length, v.device), self.product, gating)

    def reach(self) -> int | None:
        """The number of lags, on each side, beyond which coefficients need not be computed; None if all must be."""
        return None

    def dense(self, length: int) -> torch.Tensor:
        """The oracle of `forward`: its matrices, `(D, L, L)`, row i and column j as in the equation above."""
        coefficients = self.coefficients(length)
        return dense_toeplitz(two_sided(coefficients) if self.causal else coefficients)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, causal={self.causal}"
