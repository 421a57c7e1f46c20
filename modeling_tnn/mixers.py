"""The Toeplitz mixers of tokens: the gated Toeplitz unit, Hyena, and the mixer of S4.

B batch, L length, d hidden size, D = gtu_dim channels of the Toeplitz operator TNO, act = `hidden_act`.

The gated Toeplitz unit (GTU): the token mixer of the TNN paper.

    y = W_o( u * TNO(v) ),  u = act(W_u x),  v = act(W_v x)

Hyena of order 2 with a Toeplitz operator as its long filter, m = short_conv_kernel taps, r = hyena_rank rows of W_r.

    p, q, v = split( S W x + b )                       S: a short filter for each channel, m taps
    y       = W_o( p * TNO(q * v) )                                                                              (1)
    y       = W_o act( W_r( p * TNO(q * v) ) )         with `hyena_rank`                                         (2)
    y       = W_o act( W_r norm( p * TNO(q * v) ) )    with `hyena_norm` too, as in the released code            (3)

(1) is the operator of Poli et al., "Hyena Hierarchy" (ICML 2023), as the RTF paper has it in its equation 2, whose
residual connection is that of the block. (2) is the form of the RTF paper (appendix C.5.2, table 13), with GELU. W,
S, W_r and W_o have biases, as in the released code. Hyena's skip weight is the coefficient at lag 0. If it is not
causal, S reaches (m - 1) / 2 positions to each side. At padding, the projections are zero before S, and q * v after
it, because the bias and the neighbours make it nonzero. With `hyena_skip`, TNO(x) becomes TNO(x) + s * x, with a
weight in s for each channel, where a filter serves several; with `output_biases_only`, W_o alone has a bias.

The mixer of S4's blocks, in which the RTF paper measured its operator (appendix C.2.1); D = d. S4 has dropout after
the activation too; here it is after the mixer alone.

    y = GLU( W act(TNO(x)) ),      GLU(a, b) = a * sigmoid(b)

MultiHyena: Hyena with the outer product of keys k and values v in each of `num_mixer_heads` (`outer_product.py`).

    q, k, v = split( S W x + b ),    p * TNO(q * v) in (1) to (3) becomes TNO(k v^T)^T q
"""

from functools import reduce

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast

from .configuration_tnn import GTU, HYENA, MULTIHYENA, S4
from .inputs import first_real_token, roll
from .linear import apply_channel_major, apply_linear, apply_together
from .norms import RootRMSNorm, build_norm
from .numerics import by_parts, compute_dtype, must_be_eager
from .outer_product import OuterProduct
from .packing import Documents
from .tno import NO_CONTEXT, LayerContext, ToeplitzOperator, continue_sequence
from .tno_auto import build_tno
from .toeplitz_fused import NO_GATE, Gate


class TnnGatedToeplitzUnit(nn.Module):
    """The token mixer: a Toeplitz operator inside a gate."""

    together, joined = ("u_proj", "v_proj"), None  # what a step computes as one, see `linear.apply_together`

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        bias = not config.output_biases_only
        self.u_proj = nn.Linear(config.hidden_size, config.gtu_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.gtu_dim, bias=bias)
        self.o_proj = nn.Linear(config.gtu_dim, config.hidden_size)
        for projection in (self.u_proj, self.v_proj, self.o_proj):
            projection.is_gtu_projection = True  # transformers initialises linear layers without their parent
        self.act = ACT2FN[config.hidden_act]
        self.tno = build_tno(config, layer_idx)
        self.norm = build_norm(config, config.gtu_dim) if config.gtu_norm else nn.Identity()

    def forward(self, hidden_states: torch.Tensor, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        joined = self.joined if context.past_length is None else None
        u, v = apply_together(apply_channel_major, (self.u_proj, self.v_proj), hidden_states, joined)  # (B, L, D) each
        gated = mix_tokens(self.tno, v, Gate(u, self.act, context.mask), context)  # (B, L, D)
        return apply_linear(self.o_proj, self.norm(gated))


def mix_tokens(operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, context: LayerContext) -> torch.Tensor:
    """The gated product of an operator with `v` `(B, L, D)`, the first real token of a row being its first one."""
    # The rows of a divided sequence are aligned where all of their tokens are.
    if gate.mask is None or operator.shift_invariant or context.documents is not None or context.layout is not None:
        return operator(v, gate, context)
    first = first_real_token(gate.mask)
    mixed = roll(operator(roll(gate.inputs(v), -first), context=LayerContext(kernel=context.kernel)), first)
    return gate.apply(mixed, operator.implementation)


class ShortConvolution(ToeplitzOperator):
    """A filter of m taps and a bias for each of the 3 D channels: a Toeplitz operator for caches and packed rows."""

    state_name = "short"
    filters = 3  # each with the D channels of the mixer
    channel_parameters = {"taps": filters, "bias": filters}

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.channels, self.group_size = self.filters * config.gtu_dim, 1
        self.taps = nn.Parameter(torch.empty(self.channels, config.short_conv_kernel))  # (3D, m), from the lowest lag
        self.bias = None if config.output_biases_only else nn.Parameter(torch.empty(self.channels))
        self.first = 0 if self.causal else -(config.short_conv_kernel // 2)  # the lowest lag
        self.shifts_keys = config.toeplitz_mixer == MULTIHYENA

    def reset_parameters(self):
        if self.shifts_keys:
            return self.start_by_shift()
        bound = self.taps.shape[1] ** -0.5  # as PyTorch initialises a depthwise convolution
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)

    def start_by_shift(self):
        """Begin near the identity, and near a shift by one position for the keys, the second of the filters.

        At a value then stands the key before it: without this start, models do not learn to recall (measured).
        """
        start = torch.zeros_like(self.taps).view(self.filters, -1, self.taps.shape[1])  # (3, D, m)
        for number, lag in enumerate((0, 1, 0)):
            start[number, :, min(lag - self.first, self.taps.shape[1] - 1)] = 1
        init.normal_(self.taps, std=0.1)
        init.copy_(self.taps, self.taps + start.flatten(0, 1))
        if self.bias is not None:
            init.zeros_(self.bias)

    def kernel_length(self, exact: bool = False) -> int:
        return self.taps.shape[1] + self.first

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        taps = self.taps.to(device or self.taps.device)
        taps = taps.to(compute_dtype(taps.dtype))
        lowest = 0 if self.causal else 1 - length
        return pad(taps, (self.first - lowest, length - self.kernel_length()))  # negative numbers cut

    def matmul(self, v: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The product by definition: m shifted copies, of packed rows within documents. A transform takes longer."""
        taps = self.taps.to(compute_dtype(torch.promote_types(v.dtype, self.taps.dtype)))
        length, count = v.shape[1], taps.shape[1]
        x = v.permute(2, 0, 1)  # (3D, B, L), as `apply_channel_major` lays it
        around = (count - 1 + self.first, -self.first)
        begins = range(count - 1, -1, -1)  # of the copies, by their lag, among the L + m - 1 positions of `whole`
        own = None if documents is None else documents.numbers(v.device)  # (B, L)

        def of_channels(chosen: slice) -> torch.Tensor:  # (C, B, L)
            whole = pad(x[chosen].to(taps.dtype), around)
            copies = (whole[..., begin : begin + length] for begin in begins)
            terms = (copy * tap[:, None, None] for copy, tap in zip(copies, taps[chosen].unbind(1), strict=True))
            if own is not None:
                numbers = pad(own, around)
                same = (numbers[:, begin : begin + length] == own for begin in begins)
                terms = (term.where(one, 0) for term, one in zip(terms, same, strict=True))
            return reduce(torch.Tensor.add_, terms).to(v.dtype)

        return by_parts(of_channels, len(x), v.shape[0] * length, v).permute(1, 2, 0)

    def forward(self, v: torch.Tensor, gate: Gate = NO_GATE, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """The filtered projections, `(B, L, 3D)` to `(B, L, 3D)`. `gate` holds the mask of padding."""
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if context.cache is None:
                mixed = self.matmul(gate.inputs(v), context.documents)
            elif context.cache.offloading:  # between layers, and this one uses it twice
                raise ValueError("`past_key_values` must stay on the device for 'hyena', got an offloaded cache")
            else:
                mixed = continue_sequence(self, context.cache.layers[self.layer_idx], v, gate)
        if self.bias is None:
            return mixed
        return add_to(mixed, self.bias.to(mixed.dtype))


def add_to(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """total + x; in place without gradients, which saves gigabytes in a long read."""
    return total + x if torch.is_grad_enabled() or must_be_eager() else total.add_(x)


class SkipWeight(nn.Module):
    """A weight s for each channel."""

    channel_parameters = {"weight": 1}  # as an operator, for `parallel/`

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """s * x, `(B, L, D)` to `(B, L, D)`."""
        return self.weight.to(x.dtype) * x


class TnnHyena(nn.Module):
    """The token mixer of equations (1) to (3). Its operator is at `tno`, as in the gated Toeplitz unit."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        rank, bias = config.hyena_rank, not config.output_biases_only
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.gtu_dim, bias=bias)
        self.short = ShortConvolution(config, layer_idx)
        self.tno = build_tno(config, layer_idx)
        self.norm = build_norm(config, config.gtu_dim) if config.gtu_norm else nn.Identity()
        self.norm = RootRMSNorm(config.gtu_dim) if config.hyena_norm else self.norm
        self.skip = SkipWeight(config.gtu_dim) if config.hyena_skip else None
        self.low_rank = None if rank is None else nn.Linear(config.gtu_dim, rank, bias=bias)
        self.act = None if rank is None else ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(rank or config.gtu_dim, config.hidden_size)
        for projection in (self.in_proj, self.low_rank, self.o_proj):
            if projection is not None:
                projection.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(self, hidden_states: torch.Tensor, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        gate = Gate(mask=context.mask)
        # Without a name for the projections, which are freed before the long filter.
        filtered = self.short(apply_channel_major(self.in_proj, hidden_states), gate, context)  # (B, L, 3D)
        mixed = self.norm(self.mix(filtered, context))
        if self.low_rank is not None:
            mixed = self.act(apply_linear(self.low_rank, mixed))  # (B, L, r)
        return apply_linear(self.o_proj, mixed)

    def mix(self, filtered: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """The gated product with the long filter, `(B, L, 3D)` to `(B, L, D)`."""
        p, q, v = filtered.chunk(3, dim=-1)  # (B, L, D) each
        x = q * v
        mixed = mix_tokens(self.tno, x, Gate(mask=context.mask), context)
        mixed = mixed if self.skip is None else add_to(self.skip(x), mixed)
        del x
        return p * mixed


class TnnMultiHyena(TnnHyena):
    """The token mixer of MultiHyena, whose heads can recall."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.head_size = config.gtu_dim // config.num_mixer_heads

    def mix(self, filtered: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """As for `TnnHyena`."""
        queries, pairs = filtered.tensor_split([filtered.shape[2] // 3], dim=2)  # (B, L, D), (B, L, 2D)
        return mix_tokens(self.tno, pairs, OuterProduct(self.head_size, queries, context.mask), context)


class TnnS4Mixer(nn.Module):
    """The token mixer of S4's blocks. Its operator is at `tno`, as in the gated Toeplitz unit."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.tno = build_tno(config, layer_idx)
        self.act = ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(config.gtu_dim, 2 * config.hidden_size)
        self.o_proj.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(self, hidden_states: torch.Tensor, context: LayerContext = NO_CONTEXT) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        mixed = mix_tokens(self.tno, hidden_states, Gate(mask=context.mask), context)
        return nn.functional.glu(apply_linear(self.o_proj, self.act(mixed)))


# From `toeplitz_mixer` to the class. Each has its operator at `tno`, where all that walks the operators finds it.
TOEPLITZ_MIXERS = {GTU: TnnGatedToeplitzUnit, HYENA: TnnHyena, S4: TnnS4Mixer, MULTIHYENA: TnnMultiHyena}
