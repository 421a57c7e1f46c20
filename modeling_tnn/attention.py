"""Softmax attention, in the layers of a hybrid model, with its masks, rotary positions and key-value cache.

B batch, L length, S keys (those of a cache included), d hidden size, H heads of d_h numbers each, G heads of keys and
values: H / G heads of queries share one. All but W is transformers' own code.

    q, k, v = W_q x, W_k x, W_v x        y = W_o( softmax(q k^T / sqrt(d_h) + mask) v )
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, masking_utils
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from .cache_tnn import cache_argument
from .configuration_tnn import FULL, SLIDING
from .linear import apply_linear, apply_together
from .numerics import without_narrowing
from .packing import Batches
from .recurrence import check_rows, refuse_backward
from .tno import LayerContext

MASKS = {
    (FULL, True): masking_utils.create_causal_mask,
    (FULL, False): masking_utils.create_bidirectional_mask,
    (SLIDING, True): masking_utils.create_sliding_window_causal_mask,
    (SLIDING, False): masking_utils.create_bidirectional_sliding_window_mask,
}


class TnnAttention(nn.Module):
    """A token mixer: softmax attention with grouped heads."""

    together, joined = ("q_proj", "k_proj", "v_proj"), None  # as in the GTU

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
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_biases_only)

    def forward(self, hidden_states: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(B, L, d)` to `(B, L, d)`, with a cache that holds the keys and values of earlier tokens.

        The second result is softmax(..), `(B, H, L, S)`, after dropout; None for products that do not compute it.
        """
        masks, rotation = context.attention_inputs
        joined = self.joined if context.past_length is None else None
        layers = self.q_proj, self.k_proj, self.v_proj
        projected = apply_together(apply_linear, layers, hidden_states, joined)
        # (B, H, L, d_h), and twice with G; of divided projections, the heads of this process
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in projected)
        if rotation is not None:
            query, key = (one.to(value.dtype) for one in llama.apply_rotary_pos_emb(query, key, *rotation))
        if context.cache is not None:
            key, value = update_key_values(context.cache, self.layer_idx, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, llama.eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        attend = partial(attend, self, scaling=self.scaling, sliding_window=self.sliding_window, dropout=dropout)
        batches, mask = None if context.documents is None else context.documents.batches, masks[self.kind]
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


class TnnRotaryEmbedding(llama.LlamaRotaryEmbedding):
    """Rotary positions, whose frequencies stay in float32 when the model gets another dtype, or are in float64."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines `(B, L, d_h)` of positions `(B, L)`. transformers computes in float32 alone."""
        given = self.config.rope_parameters
        if x.dtype != torch.float64 or given["rope_type"] not in ("default", "linear"):
            return super().forward(x, position_ids)
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=x.dtype, device=x.device) / size  # (d_h/2,)
        frequencies = given["rope_theta"] ** -exponents / given.get("factor", 1.0)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def _apply(self, fn, recurse=True):
        return super()._apply(without_narrowing(fn, self.buffers()), recurse)


def update_key_values(cache: Cache, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
    """All keys and values of a layer: earlier ones from the cache, a constant, and the new ones `(B, G, L, d_h)`."""
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


def make_attention_inputs(model: nn.Module, hidden_states, attention_mask, context: LayerContext) -> tuple | None:
    """The masks by kind of attention, and the cosines and sines of rotary positions; None without attention.

    Masks are as `attn_implementation` takes them, `(B, 1, L, S)` for most; of packed rows outside of graphs, one for
    each batch of documents. They follow from the mask `(B, past + L)`, 0 at padding, unless that is those of a step of
    fixed shape. The cosines and sines are `(B, L, d_h)` or `(1, L, d_h)`, as the positions are.
    """
    documents = context.documents
    kinds, config = [getattr(getattr(layer, "attention", None), "kind", None) for layer in model.layers], model.config
    first = {kind: kinds.index(kind) for kind in kinds[: config.num_hidden_layers] if kind is not None}
    if not first:
        return None
    rotation = None if model.rotary is None else model.rotary(hidden_states, context.positions)
    if isinstance(attention_mask, dict):
        return attention_mask, rotation
    if documents is None or documents.batches is None:
        given = (hidden_states, attention_mask, context.cache)
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
