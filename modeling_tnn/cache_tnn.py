"""The cache of a causal TNN: layers of decoding state, for use in transformers' caches.

B batch, D channels, L length. Layers of attention hold keys and values in transformers' own layers. The others are
`TnnCacheLayer`: a `recurrence.DecodingState` for each operator of the layer, of which Hyena has two.

transformers 5.24 calls `cache` what was `past_key_values` before. The models take both names, whatever release is
installed, and return the cache by the name of that release. Only this file, the models and the configuration know the
names. Others say `cache`: `cache_argument` gives it the name of that release, `cache_of` reads it by either name.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_tnn import SLIDING, TOEPLITZ
from .extensions import extensions
from .inputs import is_elsewhere
from .numerics import is_traced
from .recurrence import DecodingState, Prompt, is_closed

NEW, OLD = "cache", "past_key_values"
CACHE = NEW if NEW in BaseModelOutputWithPast.__dataclass_fields__ else OLD


def with_cache_as(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which the cache has this `name`, one of the two. Both at once raise a ValueError."""
    given = dict(given)
    cache = given.pop(OLD if name == NEW else NEW, None)
    if cache is None:
        return given
    if given.get(name) is not None:
        raise ValueError(f"`{NEW}` and `{OLD}` are two names of one argument. Give one of them.")
    return given | {name: cache}


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of transformers' functions."""
    return {CACHE: cache}


def cache_of(given: dict[str, Any]) -> Cache | None:
    """The cache among keyword arguments."""
    return with_cache_as(CACHE, given).get(CACHE)


def takes_cache(forward: Callable) -> Callable:
    """Let `forward`, which has an argument `past_key_values` or `cache`, take it by the other name too.

    The signature has both: `generate` refuses arguments that are not in it.
    """
    signature = inspect.signature(forward)
    own = NEW if NEW in signature.parameters else OLD

    @wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **with_cache_as(own, kwargs))

    if own == OLD:
        *parameters, rest = signature.parameters.values()
        cache = inspect.Parameter(NEW, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Cache | None)
        call.__signature__ = signature.replace(parameters=[*parameters, cache, rest])
    return call


class TnnCacheLayer(CacheLayerMixin):
    """The decoding state of one layer. Its size does not grow with the text, except for kernels without an end.

    Attributes:
        states: one for each operator of the layer that has seen tokens, by `operator.state_name`.
    """

    _layer_type = TOEPLITZ
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    record_past = False
    state_class = DecodingState

    def __init__(self, **kwargs):
        super().__init__()
        self.reset()

    def reset(self):
        """Empty the layer."""
        self.states: dict[str, DecodingState] = {}
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        """Take dtype and device from the first inputs `key_states` `(B, L, D)`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def begin(self, operator, prompt: Prompt):
        """Make the state of an operator after its first tokens."""
        self.lazy_initialization(prompt.v)
        state = self.state_class(operator.recurrence(), group_size=operator.group_size)
        if self.record_past:
            state.keep_past()
        state.store_prompt(prompt)
        self.states[operator.state_name] = state

    def update(self, key_states: torch.Tensor, value_states, call: Callable[[], torch.Tensor]):
        """Return `call()` and None. `Cache.update` of an offloaded cache moves the state before and after it."""
        return call(), None

    def activate_past_recording(self):
        """Let `crop` remove up to 1,024 tokens that came one by one. transformers calls this for assisted decoding."""
        self.record_past = True
        for state in self.states.values():
            state.keep_past()

    def crop(self, tokens_to_remove: int):
        """Remove the newest tokens from the state.

        Args:
            tokens_to_remove: minus the number of tokens to remove; 0 changes nothing.

        Raises:
            ValueError: it is positive, or asks for more tokens than `max_crop`.
        """
        count, most = -int(tokens_to_remove), max_crop(self)  # transformers 5.17 gives a tensor
        if count == 0 or not self.states:
            return
        if not 0 < count <= most:
            raise ValueError(
                f"`tokens_to_remove` must be minus the number of tokens to remove, at least {-most} for this state of "
                f"{self.get_seq_length()} tokens, got {-count}. Run the text to keep through an empty cache instead."
            )
        if count == self.get_seq_length():
            self.reset()
        for state in self.states.values():
            state.crop(count)

    def get_seq_length(self) -> int:
        """The number of tokens seen."""
        return seen(self)

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length of a mask over all tokens and the next `query_length` ones, and its offset 0."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Row i gets the state of row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int):
        """Repeat each row `repeats` times."""
        for state in self.states.values():
            state.select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep the rows with the indices `(N,)`, or those where a boolean mask `(B,)` is true."""
        for state in self.states.values():
            state.select(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self):
        """Move the state to the CPU."""
        for state in self.states.values():
            state.select(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self):
        """Move the state back to its device."""
        for state in self.states.values():
            state.select(lambda tensor: tensor.to(self.device, non_blocking=True))


def max_crop(layer: TnnCacheLayer) -> int:
    """The number of newest tokens that `crop` can remove."""
    return min((state.max_crop() for state in layer.states.values()), default=0)


STATIC_LAYER_TYPE_MAPPING.setdefault(TOEPLITZ, extensions.static_layer)  # until `compile/static_cache.py` replaces it


# Fields of the configuration that may differ between the models that fill and continue a cache.
OTHER_FIELDS = {
    "num_hidden_layers", "use_cache", "tno_implementation", "tno_class", "hidden_dropout_prob", "classifier_dropout",
    "initializer", "initializer_range", "converted_from", "tie_word_embeddings", "bos_token_id", "pad_token_id",
    "eos_token_id",
}  # fmt: skip


def is_toeplitz(layer: CacheLayerMixin) -> bool:
    """Whether a layer holds states of operators. Not by its class: code loaded from the Hub has another one."""
    return hasattr(layer, "states")


def seen(layer: CacheLayerMixin) -> int | torch.Tensor:
    """The number of tokens that a layer has seen; a tensor for a static layer of attention."""
    if not is_toeplitz(layer):
        return layer.get_seq_length()
    return layer.states["tno"].length if "tno" in layer.states else 0


def past_length(layers: list[CacheLayerMixin]) -> int:
    """The number of tokens that all layers have seen, from a layer that need not read it from a device if there is."""
    return int(next((count for count in map(seen, layers) if isinstance(count, int)), seen(layers[0])))


def fits(layer: CacheLayerMixin, kind: str) -> bool:
    """Whether a layer of a cache holds what a layer of this kind needs."""
    if kind == TOEPLITZ or is_toeplitz(layer):
        return kind == TOEPLITZ and is_toeplitz(layer)
    return isinstance(layer, CacheLayerMixin) and getattr(layer, "is_sliding", False) == (kind == SLIDING)


def adopt(layers: list[CacheLayerMixin]):
    """Replace the empty layers of another copy of this code, maybe of another version, by layers of this one.

    transformers has one class for each kind of layer, that of the copy which was imported last, maybe from the Hub.
    """
    own = {kind.__name__: kind for kind in (TnnCacheLayer, *TnnCacheLayer.__subclasses__())}
    for i, layer in enumerate(layers):
        kind = own.get(type(layer).__name__, type(layer))
        if kind is not type(layer) and not layer.is_initialized:
            layers[i] = kind(max_cache_len=getattr(layer, "max_cache_len", None))
            layers[i].record_past = getattr(layer, "record_past", False)


def open_cache(model: nn.Module, cache: Cache | None, use_cache: bool | None) -> tuple[Cache | None, int]:
    """The cache of a pass of `model`, a `TnnModel`, and the number of tokens that it holds. Errors: `check_cache`.

    Layers that compute their activations again get none: they would read the tokens twice.
    """
    if cache is None and use_cache and model.config.causal:
        cache = DynamicCache(config=model.config)
    if cache is None:
        return None, 0
    if not model.config.causal:
        raise ValueError("`past_key_values` must be None for a model with causal=False, got a cache")
    check_cache(cache, model)
    first = next(index for index, layer in enumerate(model.layers) if not is_elsewhere(layer))
    past_length = int(cache.get_seq_length(first))
    recomputes = torch.is_grad_enabled() and model.training and any(x.gradient_checkpointing for x in model.layers)
    if not recomputes:
        return cache, past_length
    if past_length:
        raise ValueError("`past_key_values` must be empty with gradient checkpointing, got tokens")
    return None, 0


def check_cache(cache: Cache, model: nn.Module):
    """Refuse a cache that is none for a pass of `model`, a `TnnModel`. A `DynamicCache()` gets its layers here."""
    count = min(model.config.num_hidden_layers, len(model.layers))
    layers, kinds = getattr(cache, "layers", None), model.config.layer_types
    if layers == [] and cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = TnnCacheLayer
        layers += [DYNAMIC_LAYER_TYPE_MAPPING[kind](sliding_window=model.config.sliding_window) for kind in kinds]
    if layers and not is_traced():
        adopt(layers)
    if not layers or len(layers) < count or not all(map(fits, layers, kinds)):
        raise ValueError(
            f"`past_key_values` must be a cache for TNNs of {count} layers: one that this model returned, "
            f"DynamicCache() or DynamicCache(config=model.config), got {type(cache).__name__} of {len(layers or ())}"
        )
    pairs = zip(layers[:count], model.layers[:count], strict=True)
    held = [layer for layer, block in pairs if not is_elsewhere(block)]
    lengths = {count for count in map(seen, held) if isinstance(count, int)}  # others would be device syncs
    lengths |= {state.length for layer in held if is_toeplitz(layer) for state in layer.states.values()}
    if len(lengths) > 1:
        raise ValueError(
            "`past_key_values` is incomplete, because a pass was interrupted: its layers have seen "
            f"{min(lengths)} to {max(lengths)} tokens. Start with an empty cache."
        )
    if not is_traced():
        bind_to_config(cache, held, fields_of(model.config))
        for layer in held:  # of attention: states do the same for themselves
            for name, value in [] if is_toeplitz(layer) else vars(layer).items():
                if isinstance(value, torch.Tensor) and is_closed(value):
                    setattr(layer, name, value.clone())


def bind_to_config(cache: Cache, layers: list[CacheLayerMixin], fields: dict):
    """Record the configuration that a cache belongs to: its `fields`. One with tokens must have the same already."""
    if past_length(layers) and getattr(cache, "tnn_fields", fields) != fields:
        raise ValueError("`past_key_values` belongs to another model. Start with an empty cache.")
    cache.tnn_fields = fields


def fields_of(config: PreTrainedConfig) -> dict:
    """The fields of a `TnnConfig` that a state depends on."""
    values = vars(config)  # once: transformers intercepts each look at an attribute, and this runs for each token
    fields = {name: values[name] for name in type(config).__annotations__ if name not in OTHER_FIELDS}
    return fields | {"per_layer_config": values.get("_heterogeneity_spec")}
