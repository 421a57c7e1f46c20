"""The mixers of tokens: the gated Toeplitz unit, Hyena, the mixer of S4, and attention; and their linear layers.

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
it, because the bias and the neighbours make it nonzero.

The mixer of S4's blocks, in which the RTF paper measured its operator (appendix C.2.1); D = d. S4 has dropout after
the activation too; here it is after the mixer alone.

    y = GLU( W act(TNO(x)) ),      GLU(a, b) = a * sigmoid(b)

Softmax attention, in the layers of a hybrid model. S keys (those of a cache included), H heads of d_h numbers each, G
heads of keys and values: H / G heads of queries share one. All but W is transformers' own code.

    q, k, v = W_q x, W_k x, W_v x        y = W_o( softmax(q k^T / sqrt(d_h) + mask) v )

Linear layers are of the class `torch.nn.Linear` alone, the one that quantizers replace. The kernels that they put in
may read an input as if it were contiguous (bitsandbytes on CPUs with AVX512-BF16). So the layout of inputs and results
is the work of the functions here, around the layer.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import maybe_autocast

from .cache_tnn import cache_argument
from .configuration_tnn import FULL, GTU, HYENA, S4, SLIDING
from .inputs import first_real_token, roll
from .norms import NORM_TYPES, RootRMSNorm
from .numerics import by_parts, compute_dtype, is_exported, is_plain, is_traced, must_be_eager, without_narrowing
from .packing import Batches, Documents
from .recurrence import check_rows, refuse_backward
from .tno import NO_PASS, Pass, ToeplitzOperator
from .tno_auto import build_tno
from .toeplitz_fused import NO_GATE, Gate


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is a `torch.nn.Linear` and nothing else: no adapter, quantizer, shard or hook."""
    return type(layer) is nn.Linear and is_plain(layer)


def apply_linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)`, `(..., d)` to `(..., D)`. A layer that is not plain gets a contiguous input."""
    # Not asked in a graph, where the answer would be a condition on its lengths. Elsewhere it is the faster question.
    ordered = not is_traced() and x.is_contiguous()
    return layer(x if ordered or is_plain_linear(layer) else x.contiguous())


def apply_channel_major(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)`, `(..., L, d)` to `(..., L, D)`, whose result lies channel by channel in memory.

    W x^T costs the same as x W^T. A Toeplitz product on other memory would spend half of its time (measured) in
    strided copies. So the result of a layer that is not plain is copied.
    """
    if is_exported() or x.shape[-2] == 1:  # one token has no sequence
        return apply_linear(layer, x)
    if is_plain_linear(layer):
        return channel_major(x, layer.weight, layer.bias)
    y = apply_linear(layer, x)
    return y.flatten(0, -2).t().contiguous().t().view(y.shape)


def channel_major(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product x W^T + b, `(..., L, d)` to `(..., L, D)`, channel by channel in memory."""
    columns = x.reshape(-1, x.shape[-1]).t()  # (d, N)
    y = torch.addmm(bias[:, None], weight, columns)  # (D, N)
    return y.t().view(*x.shape[:-1], len(weight))


def apply_together(apply: Callable, layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """`apply(layer, x)` for each of several layers with biases; in the graph of a training step, by one product."""
    recorded = is_traced() and not is_exported() and torch.is_grad_enabled()
    if not (recorded and x.shape[-2] > 1 and all(map(is_plain_linear, layers))):
        return [apply(layer, x) for layer in layers]
    # In their own dtype: autocast converts the result, in one launch, and one its gradient. Elsewhere, the copy of the
    # weights would take longer than it saves.
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    product = channel_major if apply is apply_channel_major else nn.functional.linear
    return product(x, weight, bias).split([layer.out_features for layer in layers], dim=-1)


class TnnGatedToeplitzUnit(nn.Module):
    """The token mixer: a Toeplitz operator inside a gate."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.u_proj = nn.Linear(config.hidden_size, config.gtu_dim)
        self.v_proj = nn.Linear(config.hidden_size, config.gtu_dim)
        self.o_proj = nn.Linear(config.gtu_dim, config.hidden_size)
        for projection in (self.u_proj, self.v_proj, self.o_proj):
            projection.is_gtu_projection = True  # transformers initialises linear layers without their parent
        self.act = ACT2FN[config.hidden_act]
        self.tno = build_tno(config, layer_idx)
        self.norm = NORM_TYPES[config.norm_type](config.gtu_dim) if config.gtu_norm else nn.Identity()

    def forward(self, hidden_states: torch.Tensor, passed: Pass = NO_PASS) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        u, v = apply_together(apply_channel_major, (self.u_proj, self.v_proj), hidden_states)  # (B, L, D) each
        gated = mix_tokens(self.tno, v, Gate(u, self.act, passed.mask), passed)  # (B, L, D)
        return apply_linear(self.o_proj, self.norm(gated))


def mix_tokens(operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, passed: Pass) -> torch.Tensor:
    """The gated product of an operator with `v` `(B, L, D)`, the first real token of a row being its first one."""
    if gate.mask is None or operator.shift_invariant or passed.documents is not None:
        return operator(v, gate, passed)
    first = first_real_token(gate.mask)
    mixed = roll(operator(roll(gate.inputs(v), -first), passed=Pass(prepared=passed.prepared)), first)
    return gate.apply(mixed, operator.implementation)


class ShortConvolution(ToeplitzOperator):
    """A filter of m taps and a bias for each of the 3 D channels: a Toeplitz operator for caches and packed rows."""

    state_name = "short"
    filters = 3  # each with the D channels of the mixer
    channel_parameters = {"taps": filters, "bias": filters}

    def __init__(self, config: PreTrainedConfig, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.channels = self.filters * config.gtu_dim
        self.taps = nn.Parameter(torch.empty(self.channels, config.short_conv_kernel))  # (3D, m), from the lowest lag
        self.bias = nn.Parameter(torch.empty(self.channels))
        self.first = 0 if self.causal else -(config.short_conv_kernel // 2)  # the lowest lag

    def reset_parameters(self):
        bound = self.taps.shape[1] ** -0.5  # as PyTorch initialises a depthwise convolution
        for parameter in (self.taps, self.bias):
            init.uniform_(parameter, -bound, bound)

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
        x = v.permute(2, 0, 1).to(taps.dtype)  # (3D, B, L), as `apply_channel_major` lays it
        around = (count - 1 + self.first, -self.first)
        begins = range(count - 1, -1, -1)  # of the copies, by their lag, among the L + m - 1 positions of `whole`
        own = None if documents is None else documents.numbers(v.device)  # (B, L)

        def of_channels(chosen: slice) -> torch.Tensor:  # (C, B, L)
            whole = pad(x[chosen], around)
            copies = (whole[..., begin : begin + length] for begin in begins)
            terms = (copy * tap[:, None, None] for copy, tap in zip(copies, taps[chosen].unbind(1), strict=True))
            if own is not None:
                numbers = pad(own, around)
                same = (numbers[:, begin : begin + length] == own for begin in begins)
                terms = (term.where(one, 0) for term, one in zip(terms, same, strict=True))
            return reduce(torch.Tensor.add_, terms).to(v.dtype)

        return by_parts(of_channels, len(x), v.shape[0] * length, v).permute(1, 2, 0)

    def forward(self, v: torch.Tensor, gate: Gate = NO_GATE, passed: Pass = NO_PASS) -> torch.Tensor:
        """The filtered projections, `(B, L, 3D)` to `(B, L, 3D)`. `gate` holds the mask of padding."""
        with maybe_autocast(device_type=v.device.type, enabled=False):
            if passed.cache is None:
                mixed = self.matmul(gate.inputs(v), passed.documents)
            elif passed.cache.offloading:  # between layers, and this one uses it twice
                raise ValueError("`past_key_values` must stay on the device for 'hyena', got an offloaded cache")
            else:  # not through `Cache.update`, which would take the layer to be done
                mixed = passed.cache.layers[self.layer_idx].update(v, None, self, gate)[0]
        bias = self.bias.to(mixed.dtype)
        # In place: gigabytes for a long read.
        return mixed + bias if torch.is_grad_enabled() or must_be_eager() else mixed.add_(bias)


class TnnHyena(nn.Module):
    """The token mixer of equations (1) to (3). Its operator is at `tno`, as in the gated Toeplitz unit."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        rank = config.hyena_rank
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.gtu_dim)
        self.short = ShortConvolution(config, layer_idx)
        self.tno = build_tno(config, layer_idx)
        self.norm = NORM_TYPES[config.norm_type](config.gtu_dim) if config.gtu_norm else nn.Identity()
        self.norm = RootRMSNorm(config.gtu_dim) if config.hyena_norm else self.norm
        self.low_rank = None if rank is None else nn.Linear(config.gtu_dim, rank)
        self.act = None if rank is None else ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(rank or config.gtu_dim, config.hidden_size)
        for projection in (self.in_proj, self.low_rank, self.o_proj):
            if projection is not None:
                projection.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(self, hidden_states: torch.Tensor, passed: Pass = NO_PASS) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        gate = Gate(mask=passed.mask)
        # Without a name for the projections, which are freed before the long filter.
        filtered = self.short(apply_channel_major(self.in_proj, hidden_states), gate, passed)  # (B, L, 3D)
        p, q, v = filtered.chunk(3, dim=-1)  # (B, L, D) each
        mixed = self.norm(p * mix_tokens(self.tno, q * v, gate, passed))
        if self.low_rank is not None:
            mixed = self.act(apply_linear(self.low_rank, mixed))  # (B, L, r)
        return apply_linear(self.o_proj, mixed)


class TnnS4Mixer(nn.Module):
    """The token mixer of S4's blocks. Its operator is at `tno`, as in the gated Toeplitz unit."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.tno = build_tno(config, layer_idx)
        self.act = ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(config.gtu_dim, 2 * config.hidden_size)
        self.o_proj.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(self, hidden_states: torch.Tensor, passed: Pass = NO_PASS) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        mixed = mix_tokens(self.tno, hidden_states, Gate(mask=passed.mask), passed)
        return nn.functional.glu(apply_linear(self.o_proj, self.act(mixed)))


# From `toeplitz_mixer` to the class. Each has its operator at `tno`, where all that walks the operators finds it.
TOEPLITZ_MIXERS = {GTU: TnnGatedToeplitzUnit, HYENA: TnnHyena, S4: TnnS4Mixer}

MASKS = {
    (FULL, True): create_causal_mask,
    (FULL, False): create_bidirectional_mask,
    (SLIDING, True): create_sliding_window_causal_mask,
    (SLIDING, False): create_bidirectional_sliding_window_mask,
}


class TnnAttention(nn.Module):
    """A token mixer: softmax attention with grouped heads."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.kind = config, layer_idx, config.layer_types[layer_idx]
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal, self.dropout = config.causal, config.attention_dropout
        self.sliding_window = config.sliding_window if self.kind == SLIDING else None
        queries, keys = (count * self.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, passed: Pass) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(B, L, d)` to `(B, L, d)`, with a cache that holds the keys and values of earlier tokens.

        The second result is softmax(..), `(B, H, L, S)`, after dropout; None for products that do not compute it.
        """
        masks, rotation = passed.view
        projected = (apply_linear(layer, hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj))
        # (B, H, L, d_h), and twice with G; of divided projections, the heads of this process
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in projected)
        if rotation is not None:
            query, key = (one.to(value.dtype) for one in apply_rotary_pos_emb(query, key, *rotation))
        if passed.cache is not None:
            key, value = remember(passed.cache, self.layer_idx, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        attend = partial(attend, self, scaling=self.scaling, sliding_window=self.sliding_window, dropout=dropout)
        batches, mask = None if passed.documents is None else passed.documents.batches, masks[self.kind]
        if batches is not None:
            return apply_linear(self.o_proj, attend_apart(attend, (query, key, value), batches, mask)), None
        mixed, weights = attend(query, key, value, mask)  # (B, L, H, d_h)
        return apply_linear(self.o_proj, mixed.flatten(2)), weights


def attend_apart(attend: Callable, heads: Sequence[torch.Tensor], batches: Batches, masks: list) -> torch.Tensor:
    """What each document of packed rows recalls, `(B, L, H d_h)`, from its queries, keys and values in `heads`."""
    tokens = torch.cat([one.transpose(1, 2) for one in heads], dim=2)  # (B, L, H + 2G, d_h)
    counts, sizes = [one.shape[1] for one in heads], tokens.shape[2:]
    mixed = []
    for part, mask in zip(batches.split(tokens.flatten(2)), masks, strict=True):
        part = part.unflatten(2, sizes).transpose(1, 2).split(counts, dim=1)  # (N, H, M, d_h), and twice with G
        mixed.append(attend(*part, mask)[0].flatten(2))
    return batches.join(mixed, tokens.shape[:2])


class TnnRotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary positions, whose frequencies stay in float32 when the model gets another dtype."""

    def _apply(self, fn, recurse=True):
        return super()._apply(without_narrowing(fn, self.buffers()), recurse)


def remember(cache: Cache, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All keys and values of a layer, those of earlier tokens from the cache and the new ones `(B, G, L, d_h)`.

    The first tokens have gradients. The cache is a constant: a backward pass through later tokens raises an error.
    """
    layer = cache.layers[layer_idx]
    if layer.is_initialized and layer.keys.numel():
        check_rows(layer.keys.shape[0], key.shape[0])
    fills = torch.is_grad_enabled() and not int(cache.get_seq_length(layer_idx))
    # While a window records its past, transformers 5.17 returns all of it, the mask covers the newest. 0: all.
    newest = layer.get_mask_sizes(key.shape[2])[0] if getattr(layer, "record_past", False) else 0
    stored = cache.update(key.detach(), value.detach(), layer_idx)
    if not fills:
        return tuple(refuse_backward(one[:, :, -newest:], (key, value)) for one in stored)
    # A static cache has unused slots after the new tokens.
    pairs = zip((key, value), stored, strict=True)
    return tuple(torch.cat([new, old[:, :, new.shape[2] :]], dim=2) for new, old in pairs)


def view_of(
    model: nn.Module, hidden_states, attention_mask, cache: Cache | None, positions, documents
) -> tuple | None:
    """The masks by kind of attention, and the cosines and sines of rotary positions; None without attention.

    Masks are as `attn_implementation` takes them, `(B, 1, L, S)` for most; of packed rows outside of graphs, one for
    each batch of documents. The cosines and sines are `(B, L, d_h)` or `(1, L, d_h)`.

    Args:
        attention_mask: `(B, past + L)`, 0 at padding; or the masks of a step of fixed shape.
        positions: `(B, L)` or `(1, L)`; None without rotary positions.
        documents: the `Documents` of packed rows, or None.
    """
    kinds, config = [getattr(getattr(layer, "attention", None), "kind", None) for layer in model.layers], model.config
    first = {kind: kinds.index(kind) for kind in kinds[: config.num_hidden_layers] if kind is not None}
    if not first:
        return None
    rotation = None if model.rotary is None else model.rotary(hidden_states, positions)
    if isinstance(attention_mask, dict):
        return attention_mask, rotation
    if documents is None or documents.batches is None:
        given = (hidden_states, attention_mask, cache)
        return {kind: mask_of(kind, config, *given, first[kind], documents) for kind in first}, rotation
    like = [hidden_states.new_empty(*shape, 0) for shape in documents.batches.shapes]
    pairs = [*zip(like, documents.batches.real, strict=True)]
    return {kind: [mask_of(kind, config, *pair, None, first[kind]) for pair in pairs] for kind in first}, rotation


def mask_of(kind: str, config, hidden_states, attention_mask, cache: Cache | None, layer_idx: int, documents=None):
    """The mask of the layers of one `kind`, the first of which is `layer_idx`, made by transformers."""
    if attention_mask is not None:
        attention_mask = attention_mask.ne(0).expand(hidden_states.shape[0], -1)  # not len(): export would fix it
    like = hidden_states[..., :0]  # its shape and dtype are read
    # transformers' eager softmax is in float32, where the least number of float64 is -inf.
    like = like.float() if like.dtype == torch.float64 else like
    given = {"config": config, "inputs_embeds": like, "attention_mask": attention_mask}
    if config.causal:
        given |= cache_argument(cache) | {"layer_idx": layer_idx}
    if documents is not None:
        number = documents.numbers(hidden_states.device)
        given["and_mask_function"] = lambda row, head, query, key: number[row, query] == number[row, key]
    return MASKS[kind, config.causal](**given)
