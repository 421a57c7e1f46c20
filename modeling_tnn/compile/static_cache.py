"""Decoding steps of one fixed shape, so that `torch.compile` records one graph for all of them, or a CUDA graph.

B batch, D channels, C places of the history, H tokens of a block. A step reads and writes tensors alone:

    history    (B, D, C)   the newest values, the new one at `slot`
    future     (B, D, H)   what the inputs before the block add to its outputs
    cursor     (2,)        `slot`, and `position` in the block

Python's counters choose transforms, blocks and places, and a graph that reads them would hold for one token. So
`prepare_step` does before each step what depends on them: it fills a block that begins, makes room for a value, counts
the token, and writes the cursor. `generate` calls it in `prepare_inputs_for_generation`, outside of the graph. The
state is that of `TnnCacheLayer`. A step that is not compiled takes the count back and goes the usual way, which reads
less.

A CUDA graph reads and writes at the addresses that it was recorded with, and is recorded again for others. So the
tensors that a step reads have places that stay the same, from token to token and from text to text. They belong to the
operator, and hold the text that took the last step; the memory of the last text stays in use. The other inputs of a
step are small and copied into the graph. They have the same strides for every token.
"""

import contextlib
import threading
import weakref

import torch
from torch import nn
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache

from ..cache_tnn import TnnCacheLayer, cache_of, check_cache, past_length
from ..configuration_tnn import TOEPLITZ
from ..extensions import extensions
from ..inputs import token_positions
from ..mixers import mask_of
from ..numerics import is_traced
from ..recurrence import Recurrence
from ..toeplitz_fused import NO_GATE, Gate


class Places(threading.local):
    """The tensors that compiled steps of an operator read, by name, and the layer whose state they hold.

    Each thread has its own, as it has its own CUDA graphs.
    """

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self.holds = lambda: None  # a weak reference

    def give(self, layer: "TnnStaticCacheLayer"):
        """Give the places to a layer. The one that had them gets copies: its cache may be in use."""
        earlier = self.holds()
        if earlier is layer:
            return
        if earlier is not None:
            earlier.leave()
        layer.cursor = layer.computed = None
        self.holds = weakref.ref(layer)

    def put(self, name: str, fresh: torch.Tensor) -> torch.Tensor:
        """`fresh`, copied to the place of that name if it fits there, else in a place of its own."""
        place = self.tensors.get(name)
        if place is fresh:
            return place
        if place is not None and (place.shape, place.dtype, place.device) == (fresh.shape, fresh.dtype, fresh.device):
            return place.copy_(fresh)
        torch._dynamo.mark_static_address(fresh)
        self.tensors[name] = fresh
        return fresh


PLACES: weakref.WeakKeyDictionary[nn.Module, Places] = weakref.WeakKeyDictionary()


class TnnStaticCacheLayer(TnnCacheLayer):
    """The decoding state of one layer, in tensors whose shapes and addresses stay the same from token to token.

    Args:
        max_cache_len: number of tokens of the whole text, which bounds the places for a long kernel.

    Attributes:
        is_ready: whether `prepare` has been called for the next token.
    """

    _layer_type = None  # transformers would take it for dynamic caches too
    is_compileable = True

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        self.max_cache_len = max_cache_len
        super().__init__()

    def reset(self):
        """Empty the layer."""
        super().reset()
        self.is_ready, self.before = False, (0, 0)
        self.cursor = self.constants = self.computed = None

    def __getstate__(self) -> dict:
        """The state without what `prepare` makes again."""
        self.retract()
        return super().__getstate__() | dict.fromkeys(("cursor", "constants", "computed"))

    def update(self, key_states: torch.Tensor, value_states, operator, gate: Gate = NO_GATE, prepared=None):
        """As for `TnnCacheLayer`. A compiled step of one token after `prepare` has a fixed shape."""
        if not (self.is_ready and is_traced()):
            self.retract()
            return super().update(key_states, value_states, operator, gate, prepared)
        self.is_ready = False
        v = gate.inputs(key_states)
        y = self.recurrence.fixed_step(self, self.recurrence.channel_major(v))  # (B, D, 1)
        return gate.apply(y.transpose(1, 2).to(v.dtype), operator.implementation), None

    def prepare(self, operator) -> tuple[int, int]:
        """Do what the next step needs besides tensor operations, and count its token.

        Returns:
            The slot and the position of `cursor`.
        """
        self.retract()
        self._attach(operator, self.device)
        if self.prefill is not None:
            self._start()
        like = self.history.buffer[..., :1]
        self.recurrence.make_ready(self, like)
        places = PLACES.get(operator) or PLACES.setdefault(operator, Places())
        places.give(self)
        computed = self.recurrence.constants(like)
        if self.computed is None or any(new is not old for new, old in zip(computed, self.computed, strict=True)):
            constants = (places.put(f"constant {i}", one.clone()) for i, one in enumerate(computed))
            self.computed, self.constants = computed, tuple(constants)
        self.history.fix(self.max_cache_len)
        self.history.reserve()
        self.before = self.history.end, self.history.held
        slot, position = self.history.take_place(), self.counters.get("position", 0)
        if "position" in self.counters:
            self.counters["position"] += 1
        self.length += 1
        self.is_ready = True
        self._pin(places)
        return slot, position

    def retract(self):
        """Take back the count of a token that `prepare` has counted and no step has used."""
        if self.is_ready:
            self.history.end, self.history.held = self.before
            if "position" in self.counters:
                self.counters["position"] -= 1
            self.length -= 1
            self.is_ready = False

    def crop(self, tokens_to_remove: int):
        """As for `TnnCacheLayer`."""
        self.retract()
        super().crop(tokens_to_remove)

    def _begun(self, recurrence: Recurrence) -> Recurrence:
        return recurrence.in_fixed_steps()

    def _select(self, choose):
        self.retract()
        super()._select(choose)

    def leave(self):
        """Take the state out of its places, which another layer gets."""
        self.retract()
        self.cursor = self.constants = self.computed = None
        if self.history is not None:
            self._select(torch.clone)

    def _pin(self, places: Places):
        """Keep the tensors of a step at their places."""
        self.history.buffer = places.put("buffer", self.history.buffer)
        future, ahead = self.tensors.get("future"), self.tensors.get("ahead")
        if future is None:
            return
        if ahead is not None and ahead is places.tensors.get("future"):  # the two have changed places
            begun = ahead.clone()
            ahead.copy_(future)
            self.tensors |= {"future": ahead, "ahead": future.copy_(begun)}
        else:
            self.tensors["future"] = places.put("future", future)


def is_ready(cache: Cache | None, tokens: torch.Tensor, attention_mask) -> bool:
    """Whether `prepare_step` has made the cache ready for `tokens` `(B, 1, ...)`, with masks if there is attention."""
    if cache is None or tokens.shape[1] != 1:
        return False
    layers = getattr(cache, "layers", ())  # `bool` of a list cannot be traced by PyTorch 2.11
    return len(layers) > 0 and (isinstance(attention_mask, dict) or getattr(layers[0], "is_ready", False))


def prepare_step(model: nn.Module, inputs: dict) -> dict:
    """The `inputs` of a forward pass, of fixed shape if they are one token for a static cache, which is made ready.

    Args:
        model: the `TnnModel`.
        inputs: what `prepare_inputs_for_generation` of transformers returns.
    """
    tokens, cache = inputs.get("input_ids"), cache_of(inputs)
    if tokens is None or tokens.shape[1] != 1 or torch.is_grad_enabled() or not can_be_prepared(cache):
        return inputs
    # Offloaded weights are there in a forward pass alone. A block is offloaded as a whole; to walk all its parameters
    # would take 2% of a token.
    if not tokens.is_meta and any(next(block.parameters()).is_meta for block in model.layers):
        return inputs
    # The states are written in place later, also outside of inference mode.
    with contextlib.nullcontext() if is_traced() else torch.inference_mode(False), torch.no_grad():
        check_cache(cache, model)
        layers = cache.layers[: len(model.layers)]
        length = past_length(layers)
        pairs = [
            (layer, block.mixer.tno)
            for layer, block in zip(layers, model.layers, strict=True)
            if block.mixer is not None
        ]
        pairs += [
            (layer.short, block.mixer.short)
            for layer, block in zip(layers, model.layers, strict=True)
            if getattr(layer, "short", None) is not None
        ]
        mask = inputs.get("attention_mask")
        masks = masks_of_step(model, cache, tokens, mask)
        pairs = [
            (layer, operator.on_this_process() if operator.on_this_process else operator) for layer, operator in pairs
        ]
        point(pairs, [layer.prepare(operator) for layer, operator in pairs])
    positions = None
    if model.config.position_embedding == "sinusoidal" or model.rotary is not None:
        positions = laid_out(token_positions(mask, length, tokens))
    mask = None if mask is None else laid_out(mask[:, -1:])
    return inputs | {"attention_mask": masks | {TOEPLITZ: mask} if masks else mask, "position_ids": positions}


def masks_of_step(model: nn.Module, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None) -> dict:
    """The masks of attention for one token, by kind of layer, in the fixed shape of a static cache."""
    like = torch.empty(*tokens.shape, 0, dtype=model.dtype, device=tokens.device)
    kinds = model.config.layer_types
    found = {kind: mask_of(kind, model.config, like, mask, cache, kinds.index(kind)) for kind in {*kinds} - {TOEPLITZ}}
    return {kind: laid_out(one) if isinstance(one, torch.Tensor) else one for kind, one in found.items()}


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose strides follow from its shape. A slice of one row counts as contiguous whatever its strides."""
    return tensor.clone(memory_format=torch.contiguous_format)


def can_be_prepared(cache: Cache | None) -> bool:
    """Whether all layers of a cache hold a text and take steps of fixed shape."""

    def can(layer) -> bool:
        if not getattr(layer, "is_compileable", False) or not layer.is_initialized:
            return False
        return layer.recurrence.has_fixed_step if hasattr(layer, "recurrence") else True

    return all(map(can, getattr(cache, "layers", None) or [None]))


def point(pairs: list[tuple[TnnStaticCacheLayer, nn.Module]], places: list[tuple[int, int]]):
    """Write the cursors of all layers, which are given with their operators, with one copy to the device."""
    if not pairs:
        return
    first, operator = pairs[0]
    fresh = torch.tensor(places)  # (layers, 2)
    moved = any(layer.cursor is None or layer.cursor.device != layer.device for layer, _ in pairs)
    if moved or first.cursor._base.shape != fresh.shape:
        cursors = PLACES[operator].put("cursors", fresh.to(first.device, copy=True))
        for (layer, _), cursor in zip(pairs, cursors, strict=True):
            layer.cursor = cursor
            torch._dynamo.mark_static_address(cursor)
    first.cursor._base.copy_(fresh, non_blocking=True)


STATIC_LAYER_TYPE_MAPPING[TOEPLITZ] = TnnStaticCacheLayer
extensions.register(is_ready=is_ready, prepare_step=prepare_step)
