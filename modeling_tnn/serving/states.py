"""Rows of decoding states: put into another state, aligned at the newest token, and counted in bytes.

B batch, N new rows, D channels, C places of a history. Each algorithm of `recurrence.Recurrence` has its functions.
"""

from functools import singledispatch

import torch
from torch.nn.functional import pad

from ..compile.static_cache import FIXED_BASE
from ..history import SLACK, HistoryBuffer, slots_after, write_rows
from ..numerics import compute_dtype, float64_or_widest
from ..recurrence import Counters, DecodingState, FilterRecurrence, Recurrence
from ..tno_modal import ModalRecurrence
from ..tno_rpe import LateRecurrence
from ..tno_rtf import BLOCK, CompanionRecurrence, end_block


@singledispatch
def insert_state_rows(recurrence: Recurrence, state: DecodingState, other: DecodingState, rows: list[int]):
    """Give the `rows` of a state the sequences of `other`, which is used up.

    Rows beyond the present ones are added. All rows then have the length of the longest text. The others are as if
    they had padding before them.
    """
    raise NotImplementedError(f"The rows of {type(recurrence).__name__} cannot be moved")


@singledispatch
def compact(recurrence: Recurrence, state: DecodingState):
    """Free the memory of values that only `crop` may need, but for those of the last 64 tokens."""
    raise NotImplementedError(f"The rows of {type(recurrence).__name__} cannot be moved")


@singledispatch
def bytes_per_channel(recurrence: Recurrence, tokens: int, dtype: torch.dtype) -> int:
    """The most bytes of state of a channel after `tokens` tokens that came one by one, for inputs of `dtype`."""
    raise NotImplementedError(f"The size of the state of {type(recurrence).__name__} is not known")


def has_movable_rows(recurrence: Recurrence) -> bool:
    """Whether rows of the states of an algorithm can be moved."""
    return insert_state_rows.dispatch(type(recurrence)) is not insert_state_rows.dispatch(object)


@insert_state_rows.register
def _(recurrence: FilterRecurrence, state: DecodingState, other: DecodingState, rows: list[int]):
    if "future" in state.tensors:
        begin_together(recurrence, other, state.counters)
    else:  # a new block begins for all
        for one in (state, other):
            one.tensors = {name: kept for name, kept in one.tensors.items() if name not in ("future", "ahead")}
    state.history.insert_rows(other.history, rows, shared_values(state, other))
    state.tensors = {name: write_rows(one, rows, other.tensors[name]) for name, one in state.tensors.items()}


@insert_state_rows.register
def _(recurrence: ModalRecurrence, state: DecodingState, other: DecodingState, rows: list[int]):
    both, length = (state, other), max(state.length, other.length)
    reach = min(recurrence.reach(one) for one in both if one.length == length or one.counters.covered)
    reach = min(reach, recurrence.window + SLACK)
    for one in both:
        one.tensors.pop("future", None)  # a new block begins for all
        recurrence.advance_memory(one, recurrence.past(one), one.length - reach)
    state.counters.covered = length - reach
    insert_state_rows.dispatch(FilterRecurrence)(recurrence, state, other, rows)


@insert_state_rows.register
def _(recurrence: CompanionRecurrence, state: DecodingState, other: DecodingState, rows: list[int]):
    for one in (state, other):
        end_block(one)  # a new block begins for all
    state.history.insert_rows(other.history, rows, shared_values(state, other, extra=recurrence.order))


@compact.register
def _(recurrence: FilterRecurrence, state: DecodingState):
    state.history.compact(state.length)


@compact.register
def _(recurrence: ModalRecurrence, state: DecodingState):
    recurrence.advance_memory(state, recurrence.past(state), state.length - recurrence.window - SLACK)
    state.history.compact(recurrence.reach(state))


@compact.register
def _(recurrence: CompanionRecurrence, state: DecodingState):
    state.history.compact(state.length + recurrence.order)


@bytes_per_channel.register
def _(recurrence: FilterRecurrence, tokens: int, dtype: torch.dtype) -> int:
    blocks = (2 if recurrence.looks_ahead else 1) * recurrence.horizon + FIXED_BASE  # a tile of fixed steps
    held = slots_after(None if recurrence.taps is None else recurrence.taps - 1, tokens) + blocks
    return held * compute_dtype(dtype).itemsize


@bytes_per_channel.register
def _(recurrence: LateRecurrence, tokens: int, dtype: torch.dtype) -> int:
    return bytes_per_channel.dispatch(FilterRecurrence)(recurrence.resolve(), tokens, dtype)


@bytes_per_channel.register
def _(recurrence: ModalRecurrence, tokens: int, dtype: torch.dtype) -> int:
    horizon, numbers = recurrence.horizon, 2 * recurrence.operator.num_modes + FIXED_BASE
    numbers += slots_after(recurrence.window + horizon, tokens) + horizon
    return numbers * compute_dtype(dtype).itemsize


@bytes_per_channel.register
def _(recurrence: CompanionRecurrence, tokens: int, dtype: torch.dtype) -> int:
    held = slots_after(recurrence.order, tokens) + 2 * BLOCK
    return held * float64_or_widest(recurrence.operator.numerator.device).itemsize


def begin_together(recurrence: FilterRecurrence, state: DecodingState, counters: Counters):
    """Make the future of a state as if its block had begun when that of `counters` did."""
    position, tiles = counters.position, counters.tiles
    values = state.history.last(state.history.held)
    values = pad(values, (max(0, position - values.shape[-1]), 0))
    before, within = values.split([values.shape[-1] - position, position], dim=-1)
    state.history, state.tensors = HistoryBuffer(before, state.history.reach), {}
    state.counters = Counters(block=counters.block)
    recurrence.fill(state, values)
    for end in range(recurrence.base, tiles + 1, recurrence.base):
        state.history.append(within[..., end - recurrence.base : end])
        state.counters.position = end
        recurrence.pass_on_tile(state, end & -end)
    state.history.append(within[..., tiles:])
    if recurrence.looks_ahead:
        recurrence.look_ahead(state, counters.ahead, counters.block - position)


def shared_values(state: DecodingState, other: DecodingState, extra: int = 0) -> int:
    """Return the number of history values per row after a merge of two states.

    Complete histories, or those with `extra` zeros before, can be extended with zeros on the left; truncated ones
    bound the result. Zeros before all sequences, and values further than 64 beyond those still needed, are left out.
    """
    both, reach = (state.history, other.history), state.history.reach
    cut = [one.history.held for one in (state, other) if one.history.held < one.length + extra]
    count = min(cut, default=max(history.held for history in both))
    count = min(count, max(state.length, other.length) + extra)
    return count if reach is None else min(count, reach + SLACK)


def forget_first(state: DecodingState, count: int):
    """Forget the first `count` tokens of all rows of a state, which are padding."""
    state.length -= count
    if state.prompt is not None:
        state.prompt = state.prompt.select(lambda tensor: tensor[:, count:])
        return
    state.counters.covered = max(0, state.counters.covered - count)
    compact(state.recurrence, state)
