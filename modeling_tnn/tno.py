"""The contract of a Toeplitz neural operator (TNO): one Toeplitz matrix per channel, applied along the sequence.

    y_i = sum_j t_{i-j} v_j

B batch, L length, D channels. A variant is a subclass that defines the coefficients t. It needs a file of its own, and
an entry in `tno_auto.py` and in `configuration_tnn.py` or, outside the package, one call of `register_operator`.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils.generic import maybe_autocast

from .configuration_tnn import MULTIHYENA
from .extensions import extensions
from .numerics import by_parts, is_exported, is_plain, without_narrowing
from .packing import Documents
from .recurrence import FilterRecurrence, Prompt, Recurrence
from .toeplitz import causal_toeplitz_matmul, dense_toeplitz, gated_convolution, toeplitz_matmul
from .toeplitz_fused import NO_GATE, Gate, groups_as_rows, is_response, rows_as_groups

# Result of `ToeplitzOperator.kernel_of`: taps, a response, or several parts.
Kernel = torch.Tensor | tuple

# The shortest and the longest time constant of a slow start, in positions.
TIME_CONSTANTS = 512, 4096


class LayerContext(NamedTuple):
    """Inputs of a layer in a forward pass, besides the hidden states."""

    mask: torch.Tensor | None = None  # (B, L), False at padding; None if there is none
    cache: Cache | None = None  # holds the state after earlier tokens
    documents: Documents | None = None  # of packed rows
    layout: tuple | None = None  # how the sequence is divided over processes, see `parallel/sequence.py`
    attention_inputs: tuple | None = None  # masks and rotary positions, see `attention.make_attention_inputs`
    kernel: Kernel | None = None  # the kernel of the layer's operator for this length, if it is known already
    positions: torch.Tensor | None = None  # (B, L) or (1, L), if the model reads them
    past_length: int | None = 0  # number of earlier tokens; None in a compiled step, whose graph does not know it


NO_CONTEXT = LayerContext()


class ToeplitzOperator(nn.Module):
    """Base class of the operators. A variant defines `coefficients`, and may override methods with faster ones.

    n = `group_size` neighbouring channels of the inputs share a filter. What a variant calls its D channels are its
    filters: `forward` gives it the channels of a group as rows of a batch, `(nB, L, D)` in place of `(B, L, nD)`.

    A model builds it as `cls(config, layer_idx)` at `model.layers[layer_idx].mixer.tno`. Its own settings are fields
    of the configuration, because `TnnConfig` keeps unknown fields.
    """

    supports_causal = supports_bidirectional = True  # whether `config.causal` may be True, and False
    state_name = "tno"  # of its decoding state in the layer of a cache
    shift_invariant = True  # if not, rows are aligned to their first real token before the operator
    is_recurrence = False  # whether its state is small for any kernel: `to_recurrent` leaves such models unchanged
    kernel_in_parts = False  # whether the kernels of some filters cost no more than their share of those of all
    half_lags: int | None = None  # number of lags, on each side, that products in half precision need; None: all
    # Names of parameters and buffers that stay in float32 or float64 however a model is built, loaded or cast.
    fp32_parameters: tuple[str, ...] = ()
    grid_fields: tuple[str, ...] = ()  # fields of the configuration with sizes that no parameter has
    # The parameters and buffers whose rows belong to channels, each with its number of filters. None: not divisible.
    channel_parameters: dict[str, int] | None = None
    # `parallel/` sets what returns the operator of the channels of this process; None if there are no others.
    local_operator: Callable[[], "ToeplitzOperator"] | None = None
    # `compile/regions.py` sets what compiles the kernels of all layers while they are trained.
    regions: Callable | None = None
    # Whether filters begin as exponentials, t_k = exp(-k / `time_constants`), if the variant can: heads then recall.
    slow_start = False

    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        self.layer_idx, self.channels = layer_idx, config.num_filter_groups or config.gtu_dim
        self.group_size = config.operator_dim // self.channels
        self.slow_start = config.toeplitz_mixer == MULTIHYENA
        self.causal = config.causal  # whether t_k = 0 for k < 0
        self.implementation = config.tno_implementation
        # In [0, 1), different for every layer, so that layers do not start a block at the same token of decoding.
        self.refill_phase = layer_idx / config.num_hidden_layers

    @classmethod
    def check_config(cls, config):
        """Check the fields that the operator reads: `config.require(name, holds, allowed)` raises a ValueError."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "ToeplitzOperator":
        """Move or cast the operator, as all ways to cast a model do, without narrowing `fp32_parameters`."""
        named = (*self.named_parameters(), *self.named_buffers())
        exact = [one for name, one in named if name in self.fp32_parameters]
        return super()._apply(without_narrowing(fn, [*exact, *(one.grad for one in exact)]), recurse)

    def reset_parameters(self):
        """Initialise the operator's own parameters by `transformers.initialization`, which keeps loaded ones."""

    def time_constants(self, count: int) -> torch.Tensor:
        """The number of positions in which each of `count` exponentials of a slow start falls to 1/e, `(count,)`."""
        shortest, longest = (math.log2(constant) for constant in TIME_CONSTANTS)
        return torch.logspace(shortest, longest, count, base=2.0, dtype=torch.float64)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The coefficients for a sequence of `length` positions L. They do not depend on the batch.

        Args:
            device: device of the result, by default that of the parameters. An offloaded model moves its parameters
                to the device only while they are used.

        Returns:
            causal: `(D, L)`, the lags 0 .. L-1; the first m of them are the same for every length >= m.
            bidirectional: `(D, 2L - 1)`, the lags -(L-1) .. L-1.
        """
        raise NotImplementedError

    def kernel_length(self, exact: bool = False) -> int | None:
        """The number of lags, on each side, beyond which coefficients are zero in the parameters' precision, or None.

        None too if it depends on values of parameters but need not be `exact`: reading them is a device sync.
        """
        return None

    def response(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The frequency response to use instead of coefficients for a sequence of `length` positions L, or None.

        It is `(2, D, F/2 + 1)`, real and imaginary part at the frequencies 2 pi m / F, for F >= 2L - 1.
        """
        return None

    def require_positions(self, count: int):
        """Raise a ValueError if the operator cannot read `count` positions. Exported graphs do not ask."""

    def kernel_of(self, length: int, device: torch.device | None = None, as_taps: bool = False) -> Kernel:
        """The response for `length` positions or, if there is none or with `as_taps`, the coefficients."""
        if not is_exported():  # one graph serves all lengths
            self.require_positions(length)
        response = None if as_taps else self.response(length, device)
        if response is not None:
            return response
        longest = None if is_exported() else self.kernel_length()  # an exported graph serves any length
        return self.coefficients(length if longest is None else min(length, longest), device)

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        """The product with `v`, `(B, L, D)` to `(B, L, D)`. Override it for a product faster than a convolution."""
        return convolve(self, v, NO_GATE)

    def matmul_of_documents(self, v: torch.Tensor, documents: Documents) -> torch.Tensor:
        """`matmul` for each document of packed rows in a graph of torch.compile. Override it where `matmul` is."""
        if not is_convolution(self):
            name = type(self).__name__
            raise ValueError(f"`{name}.matmul_of_documents` must exist for packed rows in a compiled graph, got none")
        kernel = self.kernel_of(*kernel_arguments(self, v, as_taps=True))
        return documents.convolve(v, kernel, self.causal, self.implementation)

    def recurrence(self) -> Recurrence:
        """The algorithm that decodes the operator, which must be causal, with its present parameters."""
        require_causal(self)
        return FilterRecurrence(self, self.kernel_length(exact=True), self.refill_phase)

    def forward(self, v: torch.Tensor, gate: Gate = NO_GATE, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """The gated product with `v`, `(B, L, nD)` to `(B, L, nD)`, in float32 or float64. Do not override it.

        With a cache, `v` continues its sequences. The `gate` of the GTU is applied here, because the weights of an
        offloaded model are loaded only while their module runs.
        """
        if context.layout is not None:
            return context.layout.parallel.mix(self, v, gate, context)
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if context.documents is not None:
                return matmul_of_rows(self, v, gate, context)
            if context.cache is None:
                return gated_matmul(self, v, gate, context.kernel)
            call = partial(continue_sequence, self, context.cache.layers[self.layer_idx], v, gate, context.kernel)
            # `update` moves the states of an offloaded cache to the device, and away after the call.
            return context.cache.update(v, None, self.layer_idx, call)[0] if context.cache.offloading else call()

    def dense(self, length: int) -> torch.Tensor:
        """The matrices of the product, `(D, L, L)`, with row i and column j of the equation: an oracle for tests."""
        coefficients = self.coefficients(length)
        return dense_toeplitz(nn.functional.pad(coefficients, (length - 1, 0)) if self.causal else coefficients)

    def extra_repr(self) -> str:
        group = f", group_size={self.group_size}" if self.group_size > 1 else ""
        return f"channels={self.channels}{group}, causal={self.causal}, product={self.implementation}"


def continue_sequence(operator: ToeplitzOperator, layer, v, gate: Gate = NO_GATE, kernel: Kernel | None = None):
    """The gated product with `v` `(B, L, D)`, which continues the sequences in the `layer` of a cache."""
    state = layer.states.get(operator.state_name)
    if state is not None:
        return state.decode(operator, v, gate)
    outputs = gated_matmul(operator, v, gate, kernel)  # not detached, so training gets their gradients
    layer.begin(operator, Prompt(v.detach(), gate._replace(u=None)))
    return outputs


def is_convolution(operator: ToeplitzOperator) -> bool:
    """Whether the product is that of the base class."""
    return type(operator).matmul is ToeplitzOperator.matmul


def require_causal(operator: ToeplitzOperator):
    """Raise a ValueError if the operator is not causal."""
    if not operator.causal:
        raise ValueError("`causal` must be True for a recurrence, got False")


def kernel_arguments(operator: ToeplitzOperator, v: torch.Tensor, as_taps: bool = False) -> tuple:
    """The arguments of `kernel_of` for the product with `v` `(B, L, ...)`: lags on each side, device, as taps."""
    lags = v.shape[1]
    if operator.half_lags and v.dtype.itemsize <= 2 and not is_exported():
        lags = min(lags, operator.half_lags)  # decoding has all lags: its states are in float32
    if not as_taps and type(operator).response is not ToeplitzOperator.response:
        taps = min(lags, operator.kernel_length() or lags)
        as_taps = extensions.takes_taps(operator.implementation, v, taps if operator.causal else 2 * taps - 1)
    return lags, v.device, as_taps


def convolve(operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, kernel: Kernel | None = None) -> torch.Tensor:
    """The gated product as a convolution, with `kernel` if it is known; else a long read may take it in parts."""
    if kernel is None and operator.kernel_in_parts and is_plain(operator) and not torch.is_grad_enabled():

        def of_filters(chosen: slice) -> torch.Tensor:  # (C, B, L)
            twin, x = with_filters(operator, chosen), v[..., chosen]
            own = gate._replace(u=None if gate.u is None else gate.u[..., chosen])
            return convolve(twin, x, own, twin.kernel_of(*kernel_arguments(twin, x))).permute(2, 0, 1)

        return by_parts(of_filters, operator.channels, v.shape[1], v).permute(1, 2, 0)
    kernel = operator.kernel_of(*kernel_arguments(operator, v)) if kernel is None else kernel
    if is_response(kernel):
        return gated_convolution(v, kernel, 0, operator.implementation, gate)
    matmul = causal_toeplitz_matmul if operator.causal else toeplitz_matmul
    return matmul(v, kernel, operator.implementation, gate)


def with_filters(operator: ToeplitzOperator, chosen: slice) -> ToeplitzOperator:
    """An operator without submodules with the chosen filters: itself, or a shallow copy."""
    if chosen == slice(None):
        return operator
    twin, sides, own = copy.copy(operator), operator.channel_parameters, operator._parameters.items()
    given = {name: one.unflatten(0, (sides[name], -1)) for name, one in own if one is not None}
    rows = {name: one[:, chosen].flatten(0, 1) for name, one in given.items()}
    vars(twin).update(_parameters=operator._parameters | rows, channels=len(range(operator.channels)[chosen]))
    return twin


def gated_matmul(operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, kernel: Kernel | None) -> torch.Tensor:
    """The product `matmul` inside a gate, by one fused function if it is a convolution."""
    if not gate.is_elementwise:
        return gate.matmul(operator, v, kernel)
    size = v.shape[2] // operator.channels
    if size > 1:
        mixed = gated_matmul(operator, groups_as_rows(v, size), gate.groups_as_rows(size), kernel)
        return rows_as_groups(mixed, size)
    if is_convolution(operator):
        return convolve(operator, v, gate, kernel)
    given = () if kernel is None else (kernel,)
    return gate.apply(operator.matmul(gate.inputs(v), *given), operator.implementation)


def matmul_of_rows(operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, context: LayerContext) -> torch.Tensor:
    """The gated products of all documents of packed rows."""
    documents, kernel = context.documents, context.kernel
    if documents.batches is None:
        return gate.apply(operator.matmul_of_documents(gate.inputs(v), documents), operator.implementation)
    if kernel is None and is_convolution(operator):
        kernel = operator.kernel_of(*kernel_arguments(operator, v[:, : documents.longest], as_taps=True))
    multiply = partial(gated_matmul, operator, kernel=kernel)
    return gate.of_documents(multiply, documents.batches, v, operator.implementation)
