"""Whether a cache fits a model, and the layers that it needs.

Layers of attention hold keys and values in transformers' own layers; the others are `TnnCacheLayer`.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, DynamicLayer

from .cache_tnn import TnnCacheLayer, with_short
from .configuration_tnn import SLIDING, TOEPLITZ
from .inputs import is_elsewhere
from .numerics import is_traced

# Fields of the configuration that may differ between the models that fill and continue a cache.
OTHER_FIELDS = {
    "num_hidden_layers", "use_cache", "tno_implementation", "tno_class", "hidden_dropout_prob", "classifier_dropout",
    "initializer", "initializer_range", "converted_from", "tie_word_embeddings", "bos_token_id", "pad_token_id",
    "eos_token_id",
}  # fmt: skip


def seen(layer: CacheLayerMixin) -> int | torch.Tensor:
    """The number of tokens that a layer has seen; a tensor for a static layer of attention."""
    return layer.length if hasattr(layer, "recurrence") else layer.get_seq_length()


def past_length(layers: list[CacheLayerMixin]) -> int:
    """The number of tokens that all layers have seen, from a layer that need not read it from a device if there is."""
    return int(next((count for count in map(seen, layers) if isinstance(count, int)), seen(layers[0])))


def fits(layer: CacheLayerMixin, kind: str) -> bool:
    """Whether a layer of a cache holds what a layer of this kind needs."""
    state = hasattr(layer, "recurrence")  # not isinstance: code loaded from the Hub has another class
    if kind == TOEPLITZ or state:
        return kind == TOEPLITZ and state
    return isinstance(layer, CacheLayerMixin) and getattr(layer, "is_sliding", False) == (kind == SLIDING)


def new_layer(kind: str, sliding_window: int | None) -> CacheLayerMixin:
    """An empty layer of a dynamic cache."""
    return TnnCacheLayer() if kind == TOEPLITZ else DYNAMIC_LAYER_TYPE_MAPPING[kind](sliding_window=sliding_window)


def adopt(layers: list[CacheLayerMixin]):
    """Replace the empty layers of another copy of this code, maybe of another version, by layers of this one.

    transformers has one class for each kind of layer, that of the copy which was imported last, maybe from the Hub.
    """
    own = {kind.__name__: kind for kind in (TnnCacheLayer, *TnnCacheLayer.__subclasses__())}
    for i, layer in enumerate(layers):
        kind = own.get(type(layer).__name__, type(layer))
        if kind is not type(layer) and not layer.is_initialized:
            layers[i] = kind(max_cache_len=getattr(layer, "max_cache_len", None))


def check_cache(past_key_values: Cache, model: nn.Module):
    """Make a cache ready for a pass of `model`, a `TnnModel`. An empty `DynamicCache()` gets its layers here.

    Raises:
        ValueError: the cache cannot hold the state of a TNN, belongs to a model of another configuration, has too few
            layers, or is incomplete after an interrupted pass.
    """
    count = min(model.config.num_hidden_layers, len(model.layers))
    if count < 1:
        raise ValueError(f"`num_hidden_layers` must be at least 1, got {count}")
    layers, kinds = getattr(past_key_values, "layers", None), model.config.layer_types
    if layers == [] and past_key_values.layer_class_to_replicate is DynamicLayer:
        past_key_values.layer_class_to_replicate = TnnCacheLayer
        layers += [new_layer(kind, model.config.sliding_window) for kind in kinds]
    if layers and not is_traced():
        adopt(layers)
    if not layers or not all(map(fits, layers, kinds)):
        raise ValueError(
            "`past_key_values` must be a cache for TNNs: one that this model returned, DynamicCache() or "
            f"DynamicCache(config=model.config), got {type(past_key_values).__name__}"
        )
    if len(layers) < count:
        raise ValueError(
            f"`past_key_values` must have at least the {count} layers of the model, got {len(layers)}. "
            "Start with an empty cache."
        )
    pairs = zip(layers[:count], model.layers[:count], strict=True)
    held = with_short(layer for layer, block in pairs if not is_elsewhere(block))
    lengths = {count for count in map(seen, held) if isinstance(count, int)}  # others would stall a device
    if len(lengths) > 1:
        raise ValueError(
            "`past_key_values` is incomplete, because a pass was interrupted: its layers have seen "
            f"{min(lengths)} to {max(lengths)} tokens. Start with an empty cache."
        )
    if not is_traced():
        claim(past_key_values, held, fields_of(model.config))


def claim(past_key_values: Cache, layers: list[CacheLayerMixin], fields: dict):
    """Record the configuration that a cache belongs to.

    Args:
        layers: those of the cache that this process fills.
        fields: `fields_of` the configuration.

    Raises:
        ValueError: the cache has tokens of a model with another configuration.
    """
    if past_length(layers) and getattr(past_key_values, "tnn_fields", fields) != fields:
        raise ValueError("`past_key_values` belongs to another model. Start with an empty cache.")
    past_key_values.tnn_fields = fields


def fields_of(config: PreTrainedConfig) -> dict:
    """The fields of a `TnnConfig` that a state depends on."""
    values = vars(config)
    return {name: values[name] for name in type(config).__annotations__ if name not in OTHER_FIELDS}
