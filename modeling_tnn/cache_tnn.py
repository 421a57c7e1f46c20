"""The cache of a causal TNN: one layer of decoding state, for use in transformers' caches.

B batch, D channels. A layer holds the state of the recurrence of its operator (see `recurrence.py`):

    history    the newest values of the sequence, (B, D, C), see `history.py`
    tensors    further states by name, each (B, D, ...)
    counters   integers that belong to these states
    length     number of tokens seen
    short      for Hyena, a layer with the state of the short convolution before the operator
    prefill    inputs of the first call, if the state is only made when decoding starts

    recurrence   history holds                    tensors                                    dtype
    filter       m - 1 inputs of the operator     future (B, D, H)                           float32
    companion    N values of the filtered input   future (B, 8, 2, D), of four texts or more float64
    modal, s4d   w + 32 inputs of the operator    memory (B, D, Q), complex; future          float32

Each history also holds 64 older values, so that `crop` can remove the newest ones; after a chunk or a prompt of S
tokens S of them, up to 1,024, and in assisted decoding 1,024. A float64 model has float64 states; bfloat16 and float16
models have the dtypes of the table.

Without gradients the state after a long prompt is made at once and the inputs are freed: they take gigabytes at
100,000 tokens. The inputs of a prompt that is not much larger than its state are kept and, where the state takes time
to make, those of longer ones too (see `Recurrence.is_early`).

The first call, which fills the cache, has the gradients of a pass without a cache. A state is a constant, so a
backward pass through a later call raises an error. After a change of the weights start with an empty cache:
an old one, which is not refused, continues with a mixture of both.

A cache can be pickled and saved by `torch.save`. `torch.load(path, weights_only=True)` reads it under
`torch.serialization.safe_globals([DynamicCache, *saved_classes(cache)])`.

The name of a cache among the arguments and outputs of models.

transformers 5.24 calls `cache` what was `past_key_values` before. The models take both names, whatever release is
installed, and return the cache by the name of that release. Only this file, the models and the configuration know the
names. Others say `cache`: `cache_argument` gives it the name of that release, `cache_of` reads it by either name.

Whether a cache fits a model, and the layers that it needs.

Layers of attention hold keys and values in transformers' own layers; the others are `TnnCacheLayer`.
"""

import contextlib
import copy
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_tnn import SLIDING, TOEPLITZ
from .extensions import extensions
from .history import CHUNK_SLACK, HistoryBuffer
from .inputs import is_elsewhere
from .numerics import is_on_host, is_traced, must_be_eager
from .recurrence import DivergenceError, Recurrence
from .tno import gated_matmul
from .toeplitz_fused import NO_GATE, Gate

NEW, OLD = "cache", "past_key_values"
CACHE = NEW if NEW in BaseModelOutputWithPast.__dataclass_fields__ else OLD


def with_cache_as(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which the cache has this `name`, one of the two.

    Raises:
        ValueError: both names are given.
    """
    other = OLD if name == NEW else NEW
    if other not in given:
        return given
    given = dict(given)
    cache = given.pop(other)
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

    Raises:
        ValueError: when called with both.
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


NO_GRADIENTS = (
    "A sequence that continues a cache has no gradients, because the cache is a constant. Run the whole sequence "
    "through an empty cache or without a cache, or decode under torch.no_grad()."
)


class Constant(torch.autograd.Function):
    """The identity of a tensor that was computed without gradients. Its backward pass raises an error."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        raise RuntimeError(NO_GRADIENTS)


def refuse_backward(y: torch.Tensor, sources: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return `y`, through which a backward pass raises an error if any of its `sources` needs gradients."""
    return Constant.apply(y, *sources) if torch.is_grad_enabled() else y


class Prefill(NamedTuple):
    """The inputs of the first call of an operator, detached. `Recurrence.start` reads them when decoding starts.

    Attributes:
        v: `(B, L, D)`, before the gate.
        gate: the gate of the GTU, without `u`.
    """

    v: torch.Tensor
    gate: Gate = NO_GATE

    def inputs(self) -> torch.Tensor:
        """The inputs of the operator, `(B, L, D)`."""
        return self.gate.inputs(self.v)

    @property
    def length(self) -> int:
        """The number of tokens L."""
        return self.v.shape[1]

    def last(self, count: int) -> "Prefill":
        """The newest `count` inputs, or all if there are fewer."""
        return self.select(lambda tensor: tensor[:, max(0, tensor.shape[1] - count) :])

    def pieces(self, size: int) -> Iterator["Prefill"]:
        """The inputs in pieces of `size` tokens, the last one shorter."""
        for start in range(0, self.length, size):
            yield self.select(lambda tensor, start=start: tensor[:, start : start + size])

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "Prefill":
        """The same inputs with `choose` applied to each tensor."""
        mask = self.gate.mask
        return Prefill(choose(self.v), self.gate._replace(mask=None if mask is None else choose(mask)))


class TnnCacheLayer(CacheLayerMixin):
    """The decoding state of one layer. Its size does not grow with the text, except for kernels without an end."""

    _layer_type = TOEPLITZ
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    record_past = False

    def __init__(self, **kwargs):
        super().__init__()
        self.reset()

    def reset(self):
        """Empty the layer."""
        self.recurrence = self.history = self.prefill = None
        self.short: TnnCacheLayer | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.counters: dict[str, int] = {}
        self.length = 0
        self.is_initialized = False

    def __getstate__(self) -> dict:
        """The state without the activation and unused memory. The recurrence keeps its settings, but no kernel."""
        prefill = None if self.prefill is None else Prefill(self.prefill.inputs().detach())
        return vars(self) | {"prefill": prefill}

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = type(self)()
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def beside(self) -> "TnnCacheLayer":
        """The layer that holds the state of the short convolution before the operator (`mixers.py`)."""
        if self.short is None:
            self.short = type(self)()
            self.short.record_past = self.record_past
        return self.short

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        """Take dtype and device from the first inputs `key_states` `(B, L, D)`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states, operator, gate: Gate = NO_GATE, prepared=None):
        """The outputs of `operator` for `key_states` `(B, L, D)`, which continue the sequence seen so far.

        Args:
            value_states: not used. It is in the signature of every cache layer of transformers.
            gate, prepared: the gate of the GTU and, for the first call, the kernel, see `inputs.Pass`.

        Returns:
            The outputs `(B, L, D)`, and None.

        Raises:
            ValueError: the state has another number of sequences.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states)
            self.recurrence = operator.recurrence()
            # The state is detached. These outputs are not, so training gets their gradients.
            outputs = gated_matmul(operator, key_states, gate, prepared)
            self._keep(Prefill(key_states.detach(), gate._replace(u=None)))
        else:
            check_rows(self.num_rows(), key_states.shape[0])
            self._attach(operator, key_states.device)
            v = gate.inputs(key_states)
            y = refuse_backward(self._continue(v), itertools.chain([v], operator.parameters()))
            outputs = gate.apply(y, operator.implementation)
        self.length += key_states.shape[1]
        return outputs, None

    def activate_past_recording(self):
        """Let `crop` remove up to 1,024 tokens that came one by one. transformers calls this for assisted decoding."""
        self.record_past = True
        if self.history is not None:
            self.history.slack = CHUNK_SLACK
        if self.short is not None:
            self.short.activate_past_recording()

    def _keep(self, prompt: Prefill):
        """Make the state after the inputs of the first call or, if it may not be needed, keep the inputs.

        While training, few passes are continued, and autograd keeps the inputs anyway. A traced graph would record
        how the state of one length is made.
        """
        self.prefill = prompt
        if not torch.is_grad_enabled() and not must_be_eager() and self.recurrence.is_early(prompt):
            # Without its recurrence a model can still be scored. A continued text raises the error again.
            with contextlib.suppress(DivergenceError):
                self._start()

    def _start(self):
        # Later calls write into the state, which they could not if inference mode had made it.
        with contextlib.nullcontext() if is_traced() else torch.inference_mode(False), torch.no_grad():
            self.recurrence.start(self, self.prefill)
        if self.record_past:
            self.history.slack = CHUNK_SLACK
        self.recurrence = self._begun(self.recurrence)
        self.prefill = None

    def _begun(self, recurrence: Recurrence) -> Recurrence:
        """The recurrence of a state that has been made."""
        return recurrence

    def _continue(self, v: torch.Tensor) -> torch.Tensor:
        if self.prefill is not None:
            self._start()
        return self.recurrence.advance(self, v)

    def _attach(self, operator, device: torch.device):
        """Continue with another operator of the same kind: that of a copy of the model, or after unpickling."""
        if self.recurrence.operator is operator:
            return
        recurrence = operator.recurrence()
        self.recurrence = self._begun(recurrence.settled()) if self.prefill is None else recurrence
        self.device = device
        self._select(lambda tensor: tensor.to(device))

    def crop(self, tokens_to_remove: int):
        """Remove the newest tokens from the state.

        Args:
            tokens_to_remove: minus the number of tokens to remove; 0 changes nothing.

        Raises:
            TypeError: `tokens_to_remove` is not an integer.
            ValueError: it is positive, or asks for more tokens than `max_crop`.
        """
        try:
            tokens_to_remove = operator.index(tokens_to_remove)  # transformers 5.17 gives a tensor
        except TypeError:
            raise TypeError(f"`tokens_to_remove` must be an integer, got {tokens_to_remove!r}") from None
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be minus the number of tokens to remove, or 0, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        count, most = -tokens_to_remove, self.max_crop()
        if count > most:
            raise ValueError(
                f"`tokens_to_remove` must be at least {-most} for this state of {self.length} tokens, got {-count}. "
                "Run the text to keep through an empty cache instead."
            )
        if count == self.length:
            self.reset()
            return
        if self.prefill is None:
            self.recurrence.crop(self, count)
        else:
            self.prefill = self.prefill.select(lambda tensor: tensor[:, :-count])
        self.length -= count
        if self.short is not None:
            self.short.crop(tokens_to_remove)

    def put(self, other: "TnnCacheLayer", rows: list[int]):
        """Give the `rows` the states of `other`, which is empty afterwards. Rows beyond the present ones are added.

        All rows then have the length of the longest text. The others are as if they had padding before them.
        """
        for one in (self, other):
            if one.prefill is not None:
                one._start()
        if not self.is_initialized:
            vars(self).update(vars(other))
            self._compact()
        else:
            with torch.inference_mode(False), torch.no_grad():  # later calls write into the state
                self.recurrence.put(self, other, rows)
            self.length = max(self.length, other.length)
            if self.short is not None:
                self.short.put(other.short, rows)
        other.reset()

    def drop_padding(self, tokens: int):
        """Forget the first tokens of all rows, as many as `tokens`, which must be padding in each."""
        if self.prefill is not None:
            self.prefill = self.prefill.select(lambda tensor: tensor[:, tokens:])
        self.length -= tokens
        if self.prefill is None:
            self.recurrence.drop_padding(self, tokens)
            self.recurrence.compact(self)
        if self.short is not None:
            self.short.drop_padding(tokens)

    def _compact(self):
        """Free the memory of values that only `crop` may need."""
        if self.prefill is not None:
            self._start()
        self.recurrence.compact(self)
        if self.short is not None:
            self.short._compact()

    def max_crop(self) -> int:
        """The number of newest tokens that `crop` can remove."""
        started = self.is_initialized and self.prefill is None
        most = self.recurrence.max_crop(self) if started else self.length
        return most if self.short is None else min(most, self.short.max_crop())

    def memory_per_sequence(self) -> int:
        """The bytes of state of one sequence in this layer."""
        held = [*self.tensors.values()] + ([] if self.history is None else [self.history.buffer])
        held += [] if self.prefill is None else [self.prefill.v]
        own = sum(tensor.numel() * tensor.element_size() // max(1, tensor.shape[0]) for tensor in held)
        return own if self.short is None else own + self.short.memory_per_sequence()

    def get_seq_length(self) -> int:
        """The number of tokens seen."""
        return self.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length of a mask over all tokens and the next `query_length` ones, and its offset 0."""
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Row i gets the state of row `beam_idx[i]`. The errors are those of `batch_select_indices`."""
        self._choose_rows("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int):
        """Repeat each row `repeats` times.

        Raises:
            TypeError: `repeats` is not an integer.
            ValueError: `repeats` is negative.
        """
        if not isinstance(repeats, int):
            raise TypeError(f"`repeats` must be an integer, got {repeats!r}")
        if repeats < 0:
            raise ValueError(f"`repeats` must be at least 0, got {repeats}")
        self._select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep the rows with the indices `(N,)`, or those where a boolean mask `(B,)` is true.

        Raises:
            TypeError: `indices` is not a tensor of integers or booleans.
            ValueError: it has another shape, or an index is outside the rows (checked on the CPU only).
        """
        self._choose_rows("indices", indices)

    def offload(self):
        """Move the state to the CPU."""
        self._select(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self):
        """Move the state back to its device."""
        self._select(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _choose_rows(self, name: str, rows: torch.Tensor):
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"`{name}` must be a tensor of integers, got {type(rows).__name__}")
        if rows.is_floating_point() or rows.is_complex():
            raise TypeError(f"`{name}` must hold integers, got {rows.dtype}")
        if not self.is_initialized:
            return
        held = self.num_rows()
        mask = rows.dtype is torch.bool
        if rows.dim() != 1 or rows.is_meta or (mask and len(rows) != held):
            raise ValueError(f"`{name}` must have shape {f'({held},)' if mask else '(N,)'}, got {tuple(rows.shape)}")
        if not mask and is_on_host(rows) and rows.numel() and not -held <= rows.min() <= rows.max() < held:
            raise ValueError(f"`{name}` must be below {held}, the rows of the cache, got {rows.tolist()}")
        rows = rows if mask else rows.long()
        self._select(lambda tensor: tensor[rows.to(tensor.device)])

    def num_rows(self) -> int:
        """The number of texts."""
        return len(self.history.buffer if self.prefill is None else self.prefill.v)

    def _select(self, choose: Callable[[torch.Tensor], torch.Tensor]):
        if self.prefill is not None:
            self.prefill = self.prefill.select(choose)
        if self.history is not None:
            self.history.select(choose)
        self.tensors = {name: choose(tensor) for name, tensor in self.tensors.items()}
        if self.short is not None:
            self.short._select(choose)


def check_rows(held: int, given: int):
    """Check that the input has as many rows as the cache.

    Raises:
        ValueError: it has not.
    """
    if held != given:
        raise ValueError(
            f"The input must have {held} sequences, as `past_key_values` has, got {given}. Call "
            "batch_repeat_interleave or batch_select_indices of the cache first, or start with an empty cache."
        )


def memory_per_sequence(cache: Cache) -> int:
    """The bytes of decoding state of one sequence in all layers of a cache."""
    return sum(bytes_per_sequence(layer) for layer in cache.layers)


def bytes_per_sequence(layer: CacheLayerMixin) -> int:
    """The bytes of one sequence in a layer: its state, or its keys and values."""
    if hasattr(layer, "recurrence"):
        return layer.memory_per_sequence()
    held = [one for one in (layer.keys, layer.values) if one is not None]
    return sum(one.numel() * one.element_size() // max(1, one.shape[0]) for one in held)


def with_short(layers: Iterable[CacheLayerMixin]) -> list[CacheLayerMixin]:
    """The layers, and after each that of its short convolution if it has one."""
    return [one for layer in layers for one in (layer, getattr(layer, "short", None)) if one is not None]


def saved_classes(cache: Cache) -> list[type]:
    """The classes of this package in a saved cache, for `torch.serialization.safe_globals`."""
    layers = with_short(cache.layers)
    recurrences = {type(getattr(layer, "recurrence", None)) for layer in layers} - {type(None)}
    layers = {type(layer) for layer in cache.layers}
    return [*layers, Prefill, Gate, HistoryBuffer, *recurrences]


STATIC_LAYER_TYPE_MAPPING.setdefault(TOEPLITZ, extensions.static_layer)  # until `compile/static_cache.py` replaces it


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


def check_cache(cache: Cache, model: nn.Module):
    """Make a cache ready for a pass of `model`, a `TnnModel`. An empty `DynamicCache()` gets its layers here.

    Raises:
        ValueError: the cache cannot hold the state of a TNN, belongs to a model of another configuration, has too few
            layers, or is incomplete after an interrupted pass.
    """
    count = min(model.config.num_hidden_layers, len(model.layers))
    if count < 1:
        raise ValueError(f"`num_hidden_layers` must be at least 1, got {count}")
    layers, kinds = getattr(cache, "layers", None), model.config.layer_types
    if layers == [] and cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = TnnCacheLayer
        layers += [new_layer(kind, model.config.sliding_window) for kind in kinds]
    if layers and not is_traced():
        adopt(layers)
    if not layers or not all(map(fits, layers, kinds)):
        raise ValueError(
            "`past_key_values` must be a cache for TNNs: one that this model returned, DynamicCache() or "
            f"DynamicCache(config=model.config), got {type(cache).__name__}"
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
        claim(cache, held, fields_of(model.config))


def claim(cache: Cache, layers: list[CacheLayerMixin], fields: dict):
    """Record the configuration that a cache belongs to.

    Args:
        layers: those of the cache that this process fills.
        fields: `fields_of` the configuration.

    Raises:
        ValueError: the cache has tokens of a model with another configuration.
    """
    if past_length(layers) and getattr(cache, "tnn_fields", fields) != fields:
        raise ValueError("`past_key_values` belongs to another model. Start with an empty cache.")
    cache.tnn_fields = fields


def fields_of(config: PreTrainedConfig) -> dict:
    """The fields of a `TnnConfig` that a state depends on."""
    values = vars(config)
    return {name: values[name] for name in type(config).__annotations__ if name not in OTHER_FIELDS}
