"""The contract of a Toeplitz neural operator (TNO): one Toeplitz matrix per channel, applied along the sequence.

    y_i = sum_j t_{i-j} v_j

B batch, L length, D channels. A variant is a subclass that defines the coefficients t. It needs a file of its own, and
one line in `tno_auto.py` or, outside the package, one call of `register_operator`.

For v in half precision, a kernel with a given decay ends where its other taps hold less than 2^-12 of its mass: the
error of the product grows by a sixteenth of a rounding of bfloat16.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .extensions import extensions
from .numerics import is_exported, without_narrowing
from .packing import Documents
from .recurrence import FilterRecurrence, Recurrence
from .toeplitz import (
    dense_toeplitz,
    filter_by_response,
    gated_causal_toeplitz_matmul,
    gated_toeplitz_matmul,
    two_sided,
)
from .toeplitz_fused import NO_GATE, Gate, is_response

# The share of the mass of a kernel, the sum of all |taps|, that products in half precision leave out.
NEGLIGIBLE = 2**-12


class Pass(NamedTuple):
    """What a forward pass of a model hands to a layer, besides the hidden states.

    Attributes:
        mask: `(B, L)` of booleans, False at padding; None if there is none.
        cache: the cache that holds the state after earlier tokens.
        documents: those of packed rows.
        layout: how the sequence is divided over processes, see `parallel/sequence.py`.
        view: the masks and rotary positions of attention, see `mixers.view_of`.
        prepared: the `kernel_of` of the layer's operator for this length, if it is known already.
    """

    mask: torch.Tensor | None = None
    cache: Cache | None = None
    documents: Documents | None = None
    layout: tuple | None = None
    view: tuple | None = None
    prepared: torch.Tensor | tuple | None = None


NO_PASS = Pass()


class ToeplitzOperator(nn.Module):
    """Base class of the operators. A variant defines `coefficients`, and may override methods with faster ones.

    A model builds it as `cls(config, layer_idx)` at `model.layers[layer_idx].mixer.tno`. Its own settings are fields
    of the configuration, because `TnnConfig` keeps unknown fields.

    Class attributes:
        grid_fields: fields of the configuration with sizes that no parameter has.
        supports_causal, supports_bidirectional: whether `config.causal` may be True, and False.
        fp32_parameters: names of parameters that stay in float32 (or float64) in a model of lower precision, however
            it is built, loaded or cast.
        is_recurrence: whether the size of its decoding state is independent of the kernel length. `to_recurrent` then
            leaves the model unchanged.
        given_decay: a decay per lag that all coefficients have whatever the parameters are, or None. Variants set it.
        shift_invariant: whether it commutes with a shift of the sequence. If not, sequences are aligned to their first
            real token before the operator.

    Attributes:
        causal: whether t_k = 0 for k < 0.
        channels: number of channels D.
        layer_idx: index of the layer in the model.
        implementation: `config.tno_implementation`.
        refill_phase: number in [0, 1), different for every layer, see `recurrence.FilterRecurrence`.
    """

    supports_causal = True
    grid_fields: tuple[str, ...] = ()
    supports_bidirectional = True
    fp32_parameters: tuple[str, ...] = ()
    is_recurrence = False
    given_decay: float | None = None
    shift_invariant = True
    # What compiles the kernels of all layers while they are trained, see `compile/regions.py`.
    regions = None

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
            ValueError: a field has a value that the operator does not support.
        """

    def channel_parameters(self) -> dict[str, int] | None:
        """The names of the parameters whose rows belong to channels, each with its number of filters.

        None, unless a variant says it: the operator cannot be divided over processes.
        """
        return None

    def on_this_process(self) -> "ToeplitzOperator":
        """The operator of the channels that this process computes: all, unless they are divided over processes."""
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> "ToeplitzOperator":
        """All ways to cast a model (`to`, `half`, evaluation in half precision) leave `fp32_parameters` in float32."""
        parameters = [one for name, one in self.named_parameters() if name in self.fp32_parameters]
        return super()._apply(without_narrowing(fn, [*parameters, *(one.grad for one in parameters)]), recurse)

    def reset_parameters(self):
        """Initialise the operator's own parameters, without those of its submodules.

        Use `transformers.initialization`, which does not overwrite parameters that a checkpoint has filled.
        transformers calls it only for an operator that has a parameter of its own.
        """

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The coefficients for a sequence of `length` positions. They do not depend on the batch.

        Args:
            device: device of the result, by default that of the parameters. An offloaded model moves its parameters
                to the device only while they are used.

        Returns:
            causal: `(D, L)`, the lags 0 .. L-1; the first m of them are the same for every length >= m.
            bidirectional: `(D, 2L - 1)`, the lags -(L-1) .. L-1.
        """
        raise NotImplementedError

    def kernel_length(self) -> int | None:
        """The number of lags, on each side, beyond which coefficients are zero in the precision of the parameters.

        It is None if there is no such number, or if it depends on the values of parameters (reading them would stall
        an accelerator at every pass).
        """
        return None

    def effective_length(self) -> int | None:
        """`kernel_length` for decoding and conversion. It may read the values of parameters."""
        return self.kernel_length()

    def response(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The frequency response to use instead of coefficients for a sequence of `length` positions L, or None.

        Returns:
            `(2, D, F/2 + 1)`, real and imaginary part at the frequencies 2 pi m / F, for F >= 2L - 1.
        """
        return None

    def kernel_of(
        self, length: int, device: torch.device | None = None, as_taps: bool = False
    ) -> torch.Tensor | tuple:
        """All that a product with `length` positions needs of the parameters: the response or the coefficients.

        Args:
            as_taps: coefficients even if there is a response.
        """
        response = None if as_taps else self.response(length, device)
        if response is not None:
            return response
        longest = self.kernel_length()
        # An exported graph keeps all lags: it serves any length.
        if longest is not None and not is_exported():
            length = min(length, longest)
        return self.coefficients(length, device)

    def lags_of(self, v: torch.Tensor) -> int:
        """The number of lags, on each side, of the product with `v` `(B, L, ...)`: L, or fewer in half precision.

        Decoding has all lags: its states are in float32, and serve inputs of any dtype.
        """
        if self.given_decay is None or v.dtype.itemsize > 2 or is_exported():
            return v.shape[1]
        return min(v.shape[1], taps_above(self.given_decay, NEGLIGIBLE) or v.shape[1])

    def takes_taps(self, v: torch.Tensor) -> bool:
        """Whether the product with `v` `(B, L, ...)` is computed from taps even if there is a response."""
        if type(self).response is ToeplitzOperator.response:
            return False
        lags = min(self.lags_of(v), self.kernel_length() or v.shape[1])
        return extensions.takes_taps(self.implementation, v, lags if self.causal else 2 * lags - 1)

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        """The product with `v`, `(B, L, D)` to `(B, L, D)`. Override it for a product faster than a convolution."""
        return self._convolve(v, NO_GATE)

    def matmul_of_documents(self, v: torch.Tensor, documents: Documents) -> torch.Tensor:
        """`matmul` for each document of packed rows in a graph of torch.compile. Override it where `matmul` is.

        Raises:
            ValueError: `matmul` is overridden, and this is not.
        """
        if type(self).matmul is not ToeplitzOperator.matmul:
            raise ValueError(
                "`matmul_of_documents` must be overridden as `matmul` is for packed rows in a compiled graph, got "
                f"none in {type(self).__name__}. Without compilation it is not needed."
            )
        kernel = self.kernel_of(self.lags_of(v), v.device, as_taps=True)
        return documents.convolve(v, kernel, self.causal, self.implementation)

    def recurrence(self) -> Recurrence:
        """The algorithm that decodes the operator token by token, with its present parameters.

        Raises:
            ValueError: the operator is not causal.
        """
        self.require_causal()
        return FilterRecurrence(self, self.effective_length(), self.refill_phase)

    def require_causal(self):
        """Check that the operator is causal.

        Raises:
            ValueError: it is not.
        """
        if not self.causal:
            raise ValueError("`causal` must be True for a recurrence, got False")

    def slowest_decay(self) -> float | None:
        """The largest decay rate lambda of all channels, or None for a kernel without a decay."""
        return None

    def poles(self, most: int = 64) -> torch.Tensor | None:
        """The poles of at most `most` kernels, complex `(most, N)`, or None for a kernel without poles."""
        return None

    def forward(
        self,
        v: torch.Tensor,
        gate: Gate = NO_GATE,
        passed: Pass = NO_PASS,
    ) -> torch.Tensor:
        """The gated product with `v`, `(B, L, D)` to `(B, L, D)`. Do not override it.

        It computes in float32 or float64, also under autocast. With a cache, `v` continues the sequences that the
        cache has seen. `gate` is the gate of the GTU. It is applied here because the weights of an offloaded model are
        loaded only while their module runs.
        """
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if passed.documents is not None:
                return gate.apply(self._mix_documents(v, gate, passed), self.implementation)
            if passed.cache is None:
                return self.gated_matmul(v, gate, passed.prepared)
            return passed.cache.update(v, None, self.layer_idx, self, gate, passed.prepared)[0]

    def gated_matmul(self, v: torch.Tensor, gate: Gate, prepared: torch.Tensor | tuple | None = None) -> torch.Tensor:
        """The product `matmul` inside a gate, by one fused function if it is a convolution."""
        if type(self).matmul is ToeplitzOperator.matmul:
            return self._convolve(v, gate, prepared)
        given = () if prepared is None else (prepared,)
        return gate.apply(self.matmul(gate.inputs(v), *given), self.implementation)

    def _mix_documents(self, v: torch.Tensor, gate: Gate, passed: Pass) -> torch.Tensor:
        """The products of all documents, without the gate around them."""
        documents, prepared = passed.documents, passed.prepared
        if documents.batches is None:
            return self.matmul_of_documents(gate.inputs(v), documents)
        if prepared is None and type(self).matmul is ToeplitzOperator.matmul:
            prepared = self.kernel_of(self.lags_of(v[:, : documents.longest]), v.device, as_taps=True)
        return documents.batches.apart(
            lambda part, real: self.gated_matmul(part, Gate(act=gate.act, mask=real), prepared), v
        )

    def _convolve(self, v: torch.Tensor, gate: Gate, prepared: torch.Tensor | None = None) -> torch.Tensor:
        if prepared is None:
            prepared = self.kernel_of(self.lags_of(v), v.device, self.takes_taps(v))
        if is_response(prepared):
            return filter_by_response(v, prepared, self.implementation, gate)
        matmul = gated_causal_toeplitz_matmul if self.causal else gated_toeplitz_matmul
        return matmul(v, prepared, self.implementation, gate)

    def dense(self, length: int) -> torch.Tensor:
        """The matrices of the product, `(D, L, L)`, with row i and column j of the equation: an oracle for tests."""
        coefficients = self.coefficients(length)
        return dense_toeplitz(two_sided(coefficients) if self.causal else coefficients)

    def extra_repr(self) -> str:
        parameter = next(self.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        product = extensions.describe_product(self.implementation, device)
        return f"channels={self.channels}, causal={self.causal}, product={product}"


def taps_above(decay: float, share: float) -> int | None:
    """The number of taps beyond which those of the form decay^k hold less than `share` of the sum of all.

    These are m = ln(share) / ln(decay) taps. It is None without a decay.
    """
    if decay >= 1:
        return None
    return max(1, math.ceil(math.log(share) / math.log(decay)))
