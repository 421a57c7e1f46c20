"""The contract of a Toeplitz neural operator (TNO): one Toeplitz matrix per channel, applied along the sequence.

    y_i = sum_j t_{i-j} v_j

B batch, L length, D channels. A variant is a subclass that says where the coefficients t come from, in a file of its
own, and one line in `tno_auto.py`, or one call of `register_operator` from outside.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .gating import NO_GATE, Gate
from .numerics import is_traced
from .recurrence import FilterRecurrence, Recurrence
from .toeplitz import (
    dense_toeplitz,
    filter_by_response,
    gated_causal_toeplitz_matmul,
    gated_toeplitz_matmul,
    two_sided,
)


class ToeplitzOperator(nn.Module):
    """Base class of the operators. A variant defines `coefficients`, and further methods where it knows better.

    It is built as `cls(config, layer_idx)` and stands at `model.layers[layer_idx].gtu.tno`. Settings of its own are
    fields of the configuration: `TnnConfig` keeps fields that it does not know.

    Class attributes:
        supports_causal, supports_bidirectional: the values of `config.causal` that it can have.
        fp32_parameters: names of parameters that stay in float32 (or float64) in a model of lower precision.
        is_recurrence: whether its state does not grow with its kernel, so that `to_recurrent` has nothing to do.
        shift_invariant: whether it commutes with a shift of the sequence; if not, sequences are aligned to their first
            real token before it.

    Attributes:
        causal: whether t_k = 0 for k < 0.
        channels: D.
        layer_idx: the index of its layer in the model.
        implementation: `config.tno_implementation`, see `numerics.is_fused`.
        refill_phase: in [0, 1), different for every layer, see `recurrence.FilterRecurrence`.
    """

    supports_causal = True
    supports_bidirectional = True
    fp32_parameters: tuple[str, ...] = ()
    is_recurrence = False
    shift_invariant = True

    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        self.layer_idx = layer_idx
        self.refill_phase = layer_idx / config.num_hidden_layers
        self.causal = config.causal
        self.implementation = config.tno_implementation
        self.channels = config.gtu_dim

    @classmethod
    def check_config(cls, config):
        """Check the fields that the operator reads. `config.require(name, holds, allowed)` raises the error.

        Raises:
            ValueError: a field has a value that the operator cannot have.
        """

    def reset_parameters(self):
        """Initialise the parameters that the operator itself owns (those of its submodules excluded).

        Use `transformers.initialization`, which leaves parameters that a checkpoint has filled as they are.
        """

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

    def kernel_length(self) -> int | None:
        """The number of lags, on each side, beyond which coefficients are zero in the precision of the parameters.

        None if there is no such number, or only the values of parameters tell (reading them would stall an accelerator
        at every pass).
        """
        return None

    def effective_length(self) -> int | None:
        """`kernel_length`, where need be by the values of parameters: for decoding and for conversion."""
        return self.kernel_length()

    def response(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The frequency response to use for a sequence of `length` positions instead of coefficients, or None.

        Returns:
            `(2, D, F/2 + 1)`, real and imaginary part at the frequencies 2 pi m / F, for F >= 2L - 1.
        """
        return None

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        """The product `(B, L, D)` to `(B, L, D)`; overridden where there is a faster way than a convolution."""
        return self._convolve(v, NO_GATE)

    def recurrence(self) -> Recurrence:
        """How to decode the operator token by token, with its parameters as they are now.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        return FilterRecurrence(self, self.effective_length(), self.refill_phase)

    def require_causal(self):
        """Raise the ValueError of an operator that cannot decode."""
        if not self.causal:
            raise ValueError("causal=False is not possible: only a causal operator has a recurrence.")

    def slowest_decay(self) -> float | None:
        """The largest decay rate of all channels, for a kernel that has one."""
        return None

    def poles(self, most: int = 64) -> torch.Tensor | None:
        """Poles of at most `most` kernels, complex `(most, N)`; None for a kernel that is not a recurrence."""
        return None

    def forward(self, v: torch.Tensor, past_key_values: Cache | None = None, gate: Gate = NO_GATE) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`, in float32 at least inside, whatever autocast says. Not to be overridden.

        With a cache, `v` continues the sequences that the cache has seen. The gate is that of the GTU: it passes
        through here because the weights of an offloaded model are at hand only while their module runs.
        """
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if past_key_values is None:
                return self.gated_matmul(v, gate)
            return past_key_values.update(v, None, self.layer_idx, self, gate)[0]

    def gated_matmul(self, v: torch.Tensor, gate: Gate) -> torch.Tensor:
        """`matmul` inside a gate, by one fused function if it is a convolution."""
        if type(self).matmul is ToeplitzOperator.matmul:
            return self._convolve(v, gate)
        return gate.apply(self.matmul(gate.inputs(v)), self.implementation)

    def _convolve(self, v: torch.Tensor, gate: Gate) -> torch.Tensor:
        length = v.shape[1]
        response = self.response(length, v.device)
        if response is not None:
            return filter_by_response(v, response, self.implementation, gate)
        longest = self.kernel_length()
        # A traced graph keeps all lags: it serves any length.
        if longest is not None and not is_traced():
            length = min(length, longest)
        matmul = gated_causal_toeplitz_matmul if self.causal else gated_toeplitz_matmul
        return matmul(v, self.coefficients(length, v.device), self.implementation, gate)

    def dense(self, length: int) -> torch.Tensor:
        """The oracle of `forward`: its matrices, `(D, L, L)`, row i and column j as in the equation above."""
        coefficients = self.coefficients(length)
        return dense_toeplitz(two_sided(coefficients) if self.causal else coefficients)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, causal={self.causal}"
