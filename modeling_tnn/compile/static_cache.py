"""Decoding steps of one fixed shape, so that `torch.compile` records one graph for all of them, or a CUDA graph.

B batch, D channels, C places of the history, H tokens of a block, b of a tile, N order. A step reads and writes
tensors alone:

    history    (B, D, C)   the newest values, the new one at `slot`
    recent     (B, D, b)   those of the tile once more, or (B, D, N) a ring of the N newest. A kernel reads and writes
                           all of them, where the history would take one to read values and one to write another
    future     (B, D, H)   what the inputs before the block add to its outputs
    cursor     (2,)        `slot`, and `position` in the block

Python's counters choose transforms, blocks and places, and a graph that reads them would hold for one token. So
`prepare_step` does before each step what depends on them: it fills a block that begins, makes room for a value, counts
the token, and writes the cursor. `generate` calls it in `prepare_inputs_for_generation`, outside of the graph. A step
that is not compiled takes the count back and goes the usual way, which reads less. Tokens of one tile can be prepared
together, and their steps read a table of cursors (`compile/token_loop.py`).

A CUDA graph is recorded again for other addresses. So the tensors that a step reads have places that stay the same,
from token to token and from sequence to sequence. They belong to the operator, and hold the sequence of the last step.
The other inputs of a step are copied into the graph. They have the same strides for every token.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache

from ..attention import mask_of
from ..cache_tnn import TnnCacheLayer, cache_of, check_cache, is_toeplitz, past_length
from ..configuration_tnn import TOEPLITZ
from ..extensions import extensions
from ..inputs import check_attention_mask, token_positions
from ..linear import is_plain_linear
from ..numerics import is_on_host, is_traced
from ..recurrence import DecodingState, FilterRecurrence, Recurrence
from ..tno import LayerContext
from ..tno_rtf import CHECK_EVERY, CompanionRecurrence, end_block
from ..toeplitz_fused import NO_GATE, Gate

# The base tile in steps of fixed shape, which read a whole tile for each token, one number at a time on the CPU.
FIXED_BASE = 16

# The most bytes of values that a step writes again to write one of them: in less time than a kernel takes to start.
SMALL_RING = 2**22


class Places(threading.local):
    """Static input buffers of an operator's compiled decode step, one set per thread, as CUDA graphs are."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self.holds = lambda: None  # a weak reference
        self.graphs: dict = {}  # recorded launches that read and write them

    def give(self, state: "FixedState"):
        """Bind the buffers to a state. The one that used them gets copies, because its cache may still be in use."""
        earlier = self.holds()
        if earlier is state:
            return
        if earlier is not None:
            earlier.leave()
        state.cursor = state.computed = None
        self.holds = weakref.ref(state)

    def put(self, name: str, fresh: torch.Tensor) -> torch.Tensor:
        """`fresh`, copied to the place of that name, or as the new one if it does not fit there."""
        place = self.tensors.get(name)
        if place is fresh:
            return place
        if place is not None and (place.shape, place.dtype, place.device) == (fresh.shape, fresh.dtype, fresh.device):
            return place.copy_(fresh)
        torch._dynamo.mark_static_address(fresh)
        self.tensors[name] = fresh
        return fresh


PLACES: weakref.WeakKeyDictionary[nn.Module, Places] = weakref.WeakKeyDictionary()


def places_of(module: nn.Module) -> Places:
    """The places of an operator, or of a model."""
    return PLACES.get(module) or PLACES.setdefault(module, Places())


@dataclass(eq=False)
class FixedState(DecodingState):
    """A state in tensors whose shapes and addresses stay the same from token to token."""

    is_ready: bool = False  # whether `prepare` has been called for the next token
    in_launch: bool = False  # whether it was for all tokens of a launch, which has not ended
    prepared: int = 0  # the number of tokens that were counted
    checked: int = 0  # the number of tokens at the last check for values that are not finite
    cursor: torch.Tensor | None = None  # see above
    constants: tuple[torch.Tensor, ...] | None = None  # what a step reads of the operator, in their places
    computed: tuple[torch.Tensor, ...] | None = None  # the tensors that `constants` were copied from

    def __getstate__(self) -> dict:
        """The state without what `prepare` makes again."""
        self.retract()
        return super().__getstate__() | dict.fromkeys(("cursor", "constants", "computed"))

    def begin(self, operator, device: torch.device):
        """Do what the next step needs besides tensor operations, but for its places."""
        self.retract()
        self.bind_operator(operator, device)
        self.build()
        form_of(self.recurrence).make_ready(self.recurrence, self, self.history.buffer[..., :1])

    def room(self) -> int:
        """The most tokens that can be prepared together after `begin`: those of a tile, as far as the filter goes."""
        tile = FIXED_BASE - self.counters.position % FIXED_BASE
        if isinstance(self.recurrence, FilterRecurrence):
            try:
                self.recurrence.operator.require_positions(self.length + tile)
            except ValueError:
                return 1  # the filter ends in this tile
        return tile

    def prepare(self, operator, max_cache_len: int | None, count: int = 1) -> list[tuple[int, int]]:
        """Count the next `count` tokens after `begin`. Return their slots and positions.

        `max_cache_len` is the number of tokens of the whole sequence, which bounds the places for a long kernel.
        """
        like, form = self.history.buffer[..., :1], form_of(self.recurrence)
        places = places_of(operator)
        places.give(self)
        computed = form.constants(self.recurrence, like)
        if self.computed is None or any(new is not old for new, old in zip(computed, self.computed, strict=True)):
            constants = (places.put(f"constant {i}", one.clone()) for i, one in enumerate(computed))
            self.computed, self.constants = computed, tuple(constants)
        self.history.freeze_capacity(max_cache_len, count)
        self._pin(places)
        self.is_ready, self.prepared = True, count
        position = self.counters.position
        self.length, self.counters.position = self.length + count, position + count
        return [(slot, position + i) for i, slot in enumerate(self.history.next_slots(count))]

    def decode(self, operator, v: torch.Tensor, gate: Gate = NO_GATE) -> torch.Tensor:
        """As for `DecodingState`. A compiled step of one token after `prepare` has a fixed shape."""
        if not self.in_launch:
            if not is_traced():
                self.retract()
            if not self.is_ready:
                self.tensors.pop("recent", None)
                return super().decode(operator, v, gate)
            self.is_ready = False
        inputs, recurrence = gate.inputs(v), self.recurrence
        y = form_of(recurrence).step(recurrence, self, recurrence.channel_major(inputs))  # (B, D, 1)
        return gate.apply(self.outputs(y).to(inputs.dtype), operator.implementation)

    def retract(self):
        """Take back the count of tokens that `prepare` has counted and no step has used."""
        if self.is_ready:
            self.is_ready = False
            self.history.end, self.history.held = self.history.previous
            self.length, self.counters.position = self.length - self.prepared, self.counters.position - self.prepared

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]):
        """As for `DecodingState`."""
        self.retract()
        super().select(choose)

    def crop(self, count: int):
        """As for `DecodingState`."""
        self.tensors.pop("recent", None)
        super().crop(count)

    def leave(self):
        """Take the state out of its places, which another one gets."""
        self.cursor = self.constants = self.computed = None
        self.tensors.pop("recent", None)
        self.select(torch.clone)

    def _pin(self, places: Places):
        """Keep the tensors of a step at their places. `future` and `ahead` are exchanged when a block begins."""
        self.history.buffer = places.put("buffer", self.history.buffer)
        blocks = {name: self.tensors[name] for name in ("future", "ahead", "recent") if name in self.tensors}
        if any(one is not places.tensors.get(name) for name, one in blocks.items()):
            copies = {name: one.clone() for name, one in blocks.items()}
            self.tensors |= {name: places.put(name, one) for name, one in copies.items()}


class TnnStaticCacheLayer(TnnCacheLayer):
    """The decoding states of one layer, for steps of one fixed shape and sequences of `max_cache_len` tokens."""

    _layer_type = None  # transformers would take it for dynamic caches too
    is_compileable = True
    state_class = FixedState

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        self.max_cache_len = max_cache_len
        super().__init__()

    @property
    def is_ready(self) -> bool:
        """Whether the next token has been prepared."""
        return any(state.is_ready for state in self.states.values())

    def crop(self, tokens_to_remove: int):
        """As for `TnnCacheLayer`."""
        for state in self.states.values():
            state.retract()
        super().crop(tokens_to_remove)


class FixedForm(NamedTuple):
    """Functions of an algorithm for steps of fixed shape."""

    # Do the work before a step that depends on Python's counters, given a tensor like a column of the history.
    make_ready: Callable[[Recurrence, FixedState, torch.Tensor], None]
    # Tensors of the operator that `step` reads, given that tensor.
    constants: Callable[[Recurrence, torch.Tensor], tuple[torch.Tensor, ...]]
    # `Recurrence.step` by operations on tensors alone.
    step: Callable[[Recurrence, FixedState, torch.Tensor], torch.Tensor]


def begin_blocks(recurrence: FilterRecurrence, state: FixedState, like: torch.Tensor):
    """Fill a block that begins. If its tiles have another size than those of fixed steps, a new one begins.

    A block is whole tiles: the tiles of all layers begin together.
    """
    if recurrence.base > FIXED_BASE:
        recurrence.base, recurrence._head = FIXED_BASE, None
        state.tensors.pop("future", None)
    state.counters.block = -(-state.counters.block // FIXED_BASE) * FIXED_BASE
    recurrence.make_ready(state, like)


def make_tile_ready(recurrence: FilterRecurrence, state: FixedState, like: torch.Tensor):
    """Fill a block that begins, and have the newest values at their places in the tile."""
    begin_blocks(recurrence, state, like)
    if "recent" not in state.tensors:
        count = state.counters.position % recurrence.base
        state.tensors["recent"] = pad(state.history.last(count), (0, recurrence.base - count))  # (B, D, b)


def filter_step(recurrence: FilterRecurrence, state: FixedState, x: torch.Tensor) -> torch.Tensor:
    """The dot product runs over all places of the tile. Those of later tokens count as 0."""
    (slot, position), base = state.cursor.unbind(), recurrence.base
    place, places = position % base, torch.arange(base, device=x.device)  # (b,)
    recent = torch.where(places == place, x, state.tensors["recent"])  # (B, D, b)
    head = state.constants[0][:, (places - place + base - 1).clamp(max=base - 1)]  # (D, b)
    added = torch.where(places <= place, recent * head, 0)  # (B, D, b)
    state.tensors["recent"].copy_(recent)
    state.history.buffer.index_copy_(2, slot[None], x)
    return state.tensors["future"][..., position[None]] + added.sum(-1, keepdim=True)


def make_newest_ready(recurrence: CompanionRecurrence, state: FixedState, like: torch.Tensor):
    """Check the newest value, as `CompanionRecurrence.step` does, and have the newest values in a ring if it is small.

    A step writes all of a ring, so that reading and writing are one kernel. A large one would take longer than another
    kernel for the one value, as any one does on the CPU (5% of a step).
    """
    end_block(state)
    order, held, on_host = recurrence.order, state.history.buffer, is_on_host(like)
    if on_host or state.length - state.checked >= CHECK_EVERY:
        state.checked = state.length
        recurrence.check_finite(state.history.last(1))
    if "recent" not in state.tensors and not on_host and held[..., :order].nbytes <= SMALL_RING:
        state.tensors["recent"] = state.history.last(order).roll(state.length % order, -1)  # (B, D, N)
    state.counters.position = state.length % order


def companion_step(recurrence: CompanionRecurrence, state: FixedState, x: torch.Tensor) -> torch.Tensor:
    """The N newest values come from their places in the ring, or else in the buffer."""
    (slot, place), order = state.cursor.unbind(), recurrence.order
    place = place % order
    buffer, recent, places = state.history.buffer, state.tensors.get("recent"), torch.arange(order, device=x.device)
    if recent is None:
        places = slot - order + places  # (N,)
        past = buffer[..., torch.where(places < 0, places + buffer.shape[-1], places)]  # (B, D, N)
        y, newest = recurrence.next_value(past, x, *state.constants)
    else:
        denominator, numerator, direct = state.constants
        older = (places - place) % order  # (N,): 0 for the oldest one, as in the coefficients
        y, newest = recurrence.next_value(recent, x, denominator[:, older], numerator[:, older], direct)
        recent.copy_(torch.where(places == place, newest, recent))
    buffer.index_copy_(2, slot[None], newest)
    return y


FORMS = {
    FilterRecurrence: FixedForm(
        make_tile_ready, lambda recurrence, like: (recurrence.reversed_head(like),), filter_step
    ),
    CompanionRecurrence: FixedForm(
        make_newest_ready, lambda recurrence, like: recurrence.coefficients, companion_step
    ),
}


def form_of(recurrence: Recurrence) -> FixedForm | None:
    """The fixed form of an algorithm, or None if it has none."""
    return next((form for kind, form in FORMS.items() if isinstance(recurrence, kind)), None)


def open_step(context: LayerContext, tokens: torch.Tensor, position_ids: torch.Tensor | None) -> LayerContext | None:
    """The context of a step of `tokens` `(B, 1, ...)` that `prepare_step` has made ready, or None."""
    layers, mask = getattr(context.cache, "layers", ()), context.mask
    has_masks = isinstance(mask, dict)  # those of attention too
    # `bool` of a list cannot be traced by PyTorch 2.11.
    if len(layers) == 0 or not (has_masks or getattr(layers[0], "is_ready", False)):
        return None
    if tokens.shape[1] != 1 and not getattr(layers[0], "reads_texts", False):
        return None
    mask = check_attention_mask(mask[TOEPLITZ] if has_masks else mask, tokens, past_length=0)
    return context._replace(mask=mask, positions=position_ids, past_length=None)


def prepare_step(model: nn.Module, inputs: dict) -> dict:
    """The `inputs` of a pass of a `TnnModel`, of fixed shape if they are one token for a static cache, made ready."""
    tokens, cache, mask = inputs.get("input_ids"), cache_of(inputs), inputs.get("attention_mask")
    is_token = tokens is not None and tokens.shape[1] == 1
    if not is_token or torch.is_grad_enabled() or not takes_fixed_steps(model, cache, tokens):
        return inputs
    with writable():
        begun = begin_step(model, cache)
        masks, positions = inputs_of_step(model, cache, tokens, mask)
        write_cursors(begun)
    mask = None if mask is None else laid_out(mask[:, -1:])
    return inputs | {"attention_mask": masks | {TOEPLITZ: mask} if masks else mask, "position_ids": positions}


@contextlib.contextmanager
def writable():
    """No gradients, and tensors that can be written in place later, also outside of inference mode."""
    with contextlib.nullcontext() if is_traced() else torch.inference_mode(False), torch.no_grad():
        yield


def takes_fixed_steps(model: nn.Module, cache: Cache | None, tokens: torch.Tensor) -> bool:
    """Whether the next token of a `TnnModel` can be prepared: the layers of its cache hold tokens and have forms."""
    if not all(map(can_be_prepared, getattr(cache, "layers", None) or [None])):
        return False
    # Offloaded states and weights are there in a forward pass alone. A block's first parameter tells for all of them.
    offloads = not tokens.is_meta and any(next(block.parameters()).is_meta for block in model.layers)
    return not (cache.offloading or offloads)


def begin_step(model: nn.Module, cache: Cache) -> list[tuple[FixedState, nn.Module, int | None]]:
    """The states of a cache after `FixedState.begin`, with their operators, and the longest text of their layers."""
    check_cache(cache, model)
    begun = []
    for layer, block in zip(cache.layers[: len(model.layers)], model.layers, strict=True):
        for name, state in layer.states.items() if is_toeplitz(layer) else ():
            operator = getattr(block.mixer, name)
            operator = operator.local_operator() if operator.local_operator else operator
            state.begin(operator, layer.device)
            begun.append((state, operator, layer.max_cache_len))
    if any(state.cursor is None for state, *_ in begun):  # a sequence begins
        join_layers(model)
    return begun


def inputs_of_step(model: nn.Module, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor | None) -> tuple:
    """The masks of attention for one token by kind, in the fixed shape of a static cache, and its position if read."""
    like = torch.empty(*tokens.shape, 0, dtype=model.dtype, device=tokens.device)
    kinds, length = model.config.layer_types, past_length(cache.layers[: len(model.layers)])
    found = {kind: mask_of(kind, model.config, like, mask, cache, kinds.index(kind)) for kind in {*kinds} - {TOEPLITZ}}
    masks = {kind: laid_out(one) if isinstance(one, torch.Tensor) else one for kind, one in found.items()}
    return masks, laid_out(token_positions(mask, length, tokens)) if model.reads_positions else None


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose strides follow from its shape. A slice of one row counts as contiguous whatever its strides."""
    return tensor.clone(memory_format=torch.contiguous_format)


def join_layers(model: nn.Module):
    """Lay the weights of layers that a step applies together one after the other in memory, and their biases."""
    for part in model.modules():
        layers = [getattr(part, name) for name in getattr(part, "together", ())]
        # What was made in inference mode cannot be exchanged.
        if layers and all(is_plain_linear(layer) and not layer.weight.is_inference() for layer in layers):
            pairs = zip(("weight", "bias"), part.joined or (None, None), strict=True)
            part.joined = tuple(in_one([getattr(layer, name) for layer in layers], whole) for name, whole in pairs)


def in_one(parts: list[torch.Tensor], whole: torch.Tensor | None) -> torch.Tensor | None:
    """`parts` as one tensor, in which they lie from then on: `whole` if they already do, and None without parts."""
    if parts[0] is None:
        return None
    sizes = [len(part) for part in parts]
    if whole is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(parts, whole.split(sizes), strict=True)):
        by_rows = parts[0].is_contiguous()  # or by columns, see `tools/layout.py`
        whole = (torch.cat(parts) if by_rows else torch.cat([part.t() for part in parts], 1).t()).detach()
        torch._dynamo.mark_static_address(whole)
        for part, piece in zip(parts, whole.split(sizes), strict=True):
            part.data = piece
    return whole


def can_be_prepared(layer) -> bool:
    """Whether a layer of a cache holds tokens and takes steps of fixed shape."""
    if not getattr(layer, "is_compileable", False) or not layer.is_initialized:
        return False
    return all(form_of(state.recurrence) for state in layer.states.values()) if is_toeplitz(layer) else True


def write_cursors(begun: list[tuple[FixedState, nn.Module, int | None]], count: int = 1) -> torch.Tensor | None:
    """Count `count` tokens in what `begin_step` gave, and write the first cursors, with one copy to the device.

    Returns:
        the cursors of all tokens, `(count, states, 2)` on the CPU; None without states.
    """
    if not begun:
        return None
    table = torch.tensor([state.prepare(operator, longest, count) for state, operator, longest in begun])
    table, buffer = table.transpose(0, 1), begun[0][0].history.buffer
    moved = any(state.cursor is None or state.cursor.device != buffer.device for state, *_ in begun)
    if moved or begun[0][0].cursor._base.shape != table[0].shape:
        cursors = PLACES[begun[0][1]].put("cursors", table[0].to(buffer.device, copy=True))
        for (state, *_), cursor in zip(begun, cursors, strict=True):
            state.cursor = cursor
            torch._dynamo.mark_static_address(cursor)
    begun[0][0].cursor._base.copy_(table[0], non_blocking=True)
    return table


STATIC_LAYER_TYPE_MAPPING[TOEPLITZ] = TnnStaticCacheLayer
extensions.register(open_step=open_step, prepare_step=prepare_step)
