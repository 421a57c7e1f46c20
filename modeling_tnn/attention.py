"""Softmax attention in place of the gated Toeplitz unit: the layers of a hybrid model that recall.

    q, k, v = W_q x, W_k x, W_v x        y = W_o( softmax(q k^T / sqrt(d_h) + mask) v )

B batch, L length, S keys (those of a cache included), H heads of d_h numbers each, G heads of keys and values: H / G
heads of queries share one. Products, masks, rotary positions and caches are transformers' own. `attn_implementation`
chooses the product, as in its models.

Positions: rotary ones are counted from the first real token of each text. Without `rope_parameters` attention has no
positions: Toeplitz layers carry them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
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

from .cache_name import CACHE
from .cache_tnn import check_rows, refuse_backward
from .configuration_tnn import FULL, SLIDING, has_attention
from .linear import apply_linear
from .numerics import without_narrowing
from .packing import Batches, Documents

MASKS = {
    (FULL, True): create_causal_mask,
    (FULL, False): create_bidirectional_mask,
    (SLIDING, True): create_sliding_window_causal_mask,
    (SLIDING, False): create_bidirectional_sliding_window_mask,
}


class View(NamedTuple):
    """What the layers of one kind see in a pass.

    Attributes:
        mask: as `attn_implementation` takes it, `(B, 1, L, S)` for most.
        rotation: the cosines and sines of the positions, `(B, L, d_h)` or `(1, L, d_h)` each; None without rotary
            positions.
        batches: the documents of packed rows outside of graphs; `mask` then has a mask for each batch.
    """

    mask: torch.Tensor | list[torch.Tensor | None] | None
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    batches: Batches | None = None


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

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Cache | None, view: View
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(B, L, d)` to `(B, L, d)`, with a cache that holds the keys and values of earlier tokens.

        The second result is softmax(..), `(B, H, L, S)`, after dropout; None for products that do not compute it.
        """
        query, key, value = (
            self._heads(apply_linear(layer, hidden_states)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if view.rotation is not None:
            query, key = (one.to(value.dtype) for one in apply_rotary_pos_emb(query, key, *view.rotation))
        if past_key_values is not None:
            key, value = remember(past_key_values, self.layer_idx, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        options = {"scaling": self.scaling, "sliding_window": self.sliding_window}
        options |= {"dropout": self.dropout if self.training else 0.0}
        attend = partial(attend, self, **options)
        if view.batches is not None:
            return apply_linear(self.o_proj, attend_apart(attend, (query, key, value), view)), None
        mixed, weights = attend(query, key, value, view.mask)  # (B, L, H, d_h)
        return apply_linear(self.o_proj, mixed.flatten(2)), weights

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, L, H d_h)` to `(B, H, L, d_h)`; of a divided projection, the heads of this process.

        Raises:
            ValueError: the processes cannot share the heads.
        """
        if x.shape[-1] % self.head_dim:
            raise ValueError(
                "`num_key_value_heads` must be a multiple of the number of processes that share the heads, got "
                f"{self.config.num_key_value_heads}"
            )
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend_apart(attend: Callable[..., tuple], heads: Sequence[torch.Tensor], view: View) -> torch.Tensor:
    """What each document of packed rows recalls, `(B, L, H d_h)`, from its queries, keys and values in `heads`."""
    tokens = torch.cat([one.transpose(1, 2) for one in heads], dim=2)  # (B, L, H + 2G, d_h)
    counts, sizes = [one.shape[1] for one in heads], tokens.shape[2:]
    mixed = []
    for part, mask in zip(view.batches.split(tokens.flatten(2)), view.mask, strict=True):
        part = part.unflatten(2, sizes).transpose(1, 2).split(counts, dim=1)  # (N, H, M, d_h), and twice with G
        mixed.append(attend(*part, mask)[0].flatten(2))
    return view.batches.join(mixed, tokens.shape[:2])


class TnnRotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary positions, whose frequencies stay in float32 when the model gets another dtype."""

    def _apply(self, fn, recurse=True):
        return super()._apply(without_narrowing(fn, self.buffers()), recurse)


def has_flash_attention(config: PreTrainedConfig) -> bool:
    """Whether layers have attention by a product that takes no mask but that of padding."""
    return has_attention(config) and "flash" in config._attn_implementation


def build_rotary(config: PreTrainedConfig) -> TnnRotaryEmbedding | None:
    """The rotary positions of a model, or None if it has none."""
    return TnnRotaryEmbedding(config) if has_attention(config) and config.rope_parameters is not None else None


def remember(
    past_key_values: Cache, layer_idx: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, those of earlier tokens from the cache and the new ones `(B, G, L, d_h)`.

    The first tokens have gradients. The cache is a constant: a backward pass through later tokens raises an error.

    Raises:
        ValueError: the cache has another number of sequences.
    """
    layer = past_key_values.layers[layer_idx]
    if layer.is_initialized and layer.keys.numel():
        check_rows(layer.keys.shape[0], key.shape[0])
    fills = torch.is_grad_enabled() and not int(past_key_values.get_seq_length(layer_idx))
    # While a window records its past, transformers 5.17 returns all of it, the mask covers the newest. 0: all.
    newest = layer.get_mask_sizes(key.shape[2])[0] if getattr(layer, "record_past", False) else 0
    stored = past_key_values.update(key.detach(), value.detach(), layer_idx)
    if not fills:
        return tuple(refuse_backward(one[:, :, -newest:], (key, value)) for one in stored)
    # A static cache has unused slots after the new tokens.
    pairs = zip((key, value), stored, strict=True)
    return tuple(torch.cat([new, old[:, :, new.shape[2] :]], dim=2) for new, old in pairs)


def views_of_layers(
    model: nn.Module,
    layers: Sequence[nn.Module],
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    past_key_values: Cache | None,
    positions: torch.Tensor | None,
    documents: Documents | None,
) -> list[View | None]:
    """What each of the `layers` of a `TnnModel` sees for `hidden_states` `(B, L, d)`; None for Toeplitz layers.

    Args:
        attention_mask: `(B, past + L)`, 0 at padding; or the masks of a step of fixed shape, by kind of layer.
        positions: those of the tokens, `(B, L)` or `(1, L)`; None without rotary positions.
        documents: those of packed rows.
    """
    kinds = [getattr(getattr(layer, "attention", None), "kind", None) for layer in layers]
    found = {kind: index for index, kind in reversed([*enumerate(kinds)]) if kind is not None}
    if not found:
        return kinds
    rotation = None if model.rotary is None else model.rotary(hidden_states, positions)
    masks, batches = attention_mask, None if documents is None else documents.batches
    if batches is not None:
        like = [hidden_states.new_empty(*shape, 0) for shape in batches.shapes]
        pairs = [*zip(like, batches.real, strict=True)]
        masks = {
            kind: [mask_of(kind, model.config, *pair, None, index) for pair in pairs] for kind, index in found.items()
        }
    elif not isinstance(masks, dict):
        masks = {
            kind: mask_of(kind, model.config, hidden_states, attention_mask, past_key_values, index, documents)
            for kind, index in found.items()
        }
    return [None if kind is None else View(masks[kind], rotation, batches) for kind in kinds]


def mask_of(
    kind: str,
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    layer_idx: int,
    documents: Documents | None = None,
) -> torch.Tensor | None:
    """The mask of the layers of one `kind`, the first of which is `layer_idx`, made by transformers."""
    if attention_mask is not None:
        attention_mask = attention_mask.ne(0).expand(hidden_states.shape[0], -1)  # not len(): export would fix it
    like = hidden_states[..., :0]  # its shape and dtype are read
    # transformers' eager softmax is in float32, where the least number of float64 is -inf.
    like = like.float() if like.dtype == torch.float64 else like
    given = {"config": config, "inputs_embeds": like, "attention_mask": attention_mask}
    if config.causal:
        given |= {CACHE: past_key_values, "layer_idx": layer_idx}
    if documents is not None:
        number = documents.numbers(hidden_states.device)
        given["and_mask_function"] = lambda row, head, query, key: number[row, query] == number[row, key]
    return MASKS[kind, config.causal](**given)
