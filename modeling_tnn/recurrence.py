"""Decode a causal Toeplitz operator token by token: the state, the contract, and exact decoding of any kernel.

    y_t = sum_{j=0}^{m-1} k_j v_{t-j}

B batch, D channels, L length of a chunk, m taps, T tokens seen, H horizon (a block of tokens), b base tile.

`FilterRecurrence` keeps the last m - 1 inputs. At the start of a block one transform computes what these inputs
add to all H outputs of the block (the future). Within the block a dot product with the first taps adds the inputs
since the last tile. A tile of U inputs (U is the lowest set bit of the position in the block, and at least b) is added
to the next U outputs by a transform of length 2U (relaxed multiplication: van der Hoeven 2002; Oncescu et al., "Flash
Inference", 2024; Agarwal et al., "FutureFill", 2024). With H = b there are no tiles, which is best for short kernels.
Kernels that never end (no decay) use a long horizon: their cost per token is nearly constant, but their state grows.
Layers start their blocks at different times, so that their transforms do not all happen at the same token.

The first call has the gradients of a pass without a cache. A state is a constant, so a backward pass through a later
call raises an error. After a change of the weights start with an empty cache: an old one has the old states.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .history import CHUNK_SLACK, SLACK, HistoryBuffer, slack_after
from .numerics import compute_dtype, is_on_host, is_traced, must_be_eager, next_fast_len
from .toeplitz_fused import NO_GATE, Gate

# (horizon, base tile) for kernels up to this many taps, and for longer ones.
SHORT_KERNEL = 4096
SHORT_BLOCKS = (128, 128)
LONG_BLOCKS = (2048, 64)

# The contribution of inputs before the last H tokens to the next block of a short kernel is computed a block earlier,
# in this number of groups of channels, so that no token takes much longer than the others.
PARTS = 32

# On the CPU channels are transformed in groups of about this many numbers, so that temporaries stay in the cache.
GROUP = 2**18

# A prompt is read in chunks of PIECE tokens, so that temporaries do not grow with it. Up to LONG_PROMPT tokens the
# inputs are kept where the state takes time to make: most passes are never continued.
PIECE, LONG_PROMPT = 1024, 16384


class DivergenceError(ValueError):
    """A recurrence cannot decode, because its state becomes inexact or infinite."""


class Constant(torch.autograd.Function):
    """The identity of a tensor that was computed without gradients. Its backward pass raises an error."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        raise RuntimeError(
            "A sequence that continues a cache has no gradients, because the cache is a constant. Run the whole "
            "sequence through an empty cache or without a cache, or decode under torch.no_grad()."
        )


def refuse_backward(y: torch.Tensor, sources: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return `y`, through which a backward pass raises an error if any of its `sources` needs gradients."""
    return Constant.apply(y, *sources) if torch.is_grad_enabled() else y


class Prompt(NamedTuple):
    """The inputs of the first call of an operator, detached. `Recurrence.prefill` reads them when decoding starts."""

    v: torch.Tensor  # (B, L, D), before the gate
    gate: Gate = NO_GATE  # that of the GTU, without `u`

    def inputs(self) -> torch.Tensor:
        """The inputs of the operator, `(B, L, D)`."""
        return self.gate.inputs(self.v)

    @property
    def length(self) -> int:
        """The number of tokens L."""
        return self.v.shape[1]

    def last(self, count: int) -> "Prompt":
        """The newest `count` inputs, or all if there are fewer."""
        return self.select(lambda tensor: tensor[:, max(0, tensor.shape[1] - count) :])

    def pieces(self, size: int) -> Iterator["Prompt"]:
        """The inputs in pieces of `size` tokens, the last one shorter."""
        for start in range(0, self.length, size):
            yield self.select(lambda tensor, start=start: tensor[:, start : start + size])

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "Prompt":
        """The same inputs with `choose` applied to each tensor."""
        mask = self.gate.mask
        return Prompt(choose(self.v), self.gate._replace(mask=None if mask is None else choose(mask)))


@dataclass
class Counters:
    """Whole numbers that belong to the tensors of a state. Each algorithm counts with some of them."""

    block: int = 0  # number of tokens of the present block; the first one may be short
    position: int = 0  # number of tokens of the block that have been decoded
    tiles: int = 0  # position in the block whose tiles have been added to the future
    ahead: int = 0  # number of channels for which the next block has been computed in part
    covered: int = 0  # number of tokens that the memory holds


@dataclass(eq=False)
class DecodingState:
    """Decoding state of the sequences of a batch in one operator.

    Where n neighbouring channels share a filter, each of them has a row: B is n times the number of sequences.

    recurrence   history holds                    tensors, each (B, D, ...)                  dtype
    filter       m - 1 inputs of the operator     future (B, D, H)                           float32
    companion    N values of the filtered input   future (B, H, 2, D), of four rows or more  float64
    modal, s4d   w + 32 inputs of the operator    memory (B, D, Q), complex; future          float32

    Each history also holds 64 older values, so that `crop` can remove the newest ones; after a chunk or a prompt of S
    tokens S of them, up to 1,024, and in assisted decoding 1,024. A float64 model has float64 states; bfloat16 and
    float16 models have the dtypes of the table.
    """

    recurrence: "Recurrence | None" = None  # reads and writes the state; None before the first token
    prompt: Prompt | None = None  # the inputs of the first call, until the state is made
    history: HistoryBuffer | None = None  # the newest values of the sequences, (B, D, C), from then on
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # further ones by name
    counters: Counters = field(default_factory=Counters)  # whole numbers that belong to them
    length: int = 0  # number of tokens seen
    group_size: int = 1  # rows of the tensors for each sequence
    slack: int = SLACK  # number of newest tokens that can be removed at any time

    def __getstate__(self) -> dict:
        """The state without the activation of the gate."""
        prompt = None if self.prompt is None else Prompt(self.prompt.inputs())
        return vars(self) | {"prompt": prompt}

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return len(self.history.buffer) // self.group_size if self.prompt is None else len(self.prompt.v)

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]):
        """Apply `choose`, a function of a tensor along its batch dimension, to all tensors."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            size = self.group_size
            return choose(tensor) if size == 1 else choose(tensor.unflatten(0, (-1, size))).flatten(0, 1)

        if self.prompt is not None:
            self.prompt = self.prompt.select(choose)
        if self.history is not None:
            self.history.buffer = chosen(self.history.buffer)
        self.tensors = {name: chosen(tensor) for name, tensor in self.tensors.items()}

    def keep_past(self):
        """Let `crop` remove up to 1,024 tokens that come one by one."""
        self.slack = CHUNK_SLACK
        if self.history is not None:
            self.history.slack = CHUNK_SLACK

    def store_prompt(self, prompt: Prompt):
        """Make the state after the inputs of the first call or, if it may not be needed, store the inputs.

        While training, autograd stores the inputs anyway. A traced graph would record how the state of one length is
        made.
        """
        self.prompt, self.length = prompt, prompt.length
        if not torch.is_grad_enabled() and not must_be_eager() and self.recurrence.builds_state_in_prefill(prompt):
            # Without its recurrence a model can still be scored. A continued text raises the error again.
            with contextlib.suppress(DivergenceError):
                self.build()

    def build(self):
        """Make the state from the prompt, if this has not been done, and let later calls write into it.

        Outside of inference mode nothing can be written into what was made in it.
        """
        if self.prompt is not None:
            with contextlib.nullcontext() if is_traced() else torch.inference_mode(False), torch.no_grad():
                self.recurrence.prefill(self, self.prompt)
            self.prompt, self.history.slack = None, self.slack
        elif is_closed(self.history.buffer) or any(map(is_closed, self.tensors.values())):
            self.select(torch.clone)

    def decode(self, operator, v: torch.Tensor, gate: Gate = NO_GATE) -> torch.Tensor:
        """The gated outputs of `operator` for `v` `(B, L, D)`, which continues the sequences."""
        check_rows(self.rows, len(v))
        self.bind_operator(operator, v.device)
        inputs, recurrence = gate.inputs(v), self.recurrence
        with torch.no_grad():
            self.build()
            x = recurrence.channel_major(inputs)  # (B, D, L)
            y = (recurrence.step if v.shape[1] == 1 else recurrence.chunk)(self, x)  # (B, D, L)
        self.length += v.shape[1]
        y = refuse_backward(self.outputs(y).to(inputs.dtype), chain([inputs], operator.parameters()))
        return gate.apply(y, operator.implementation)

    def outputs(self, y: torch.Tensor) -> torch.Tensor:
        """The outputs `(B, D, L)` of the recurrence as those of the operator, `(B, L, D)`."""
        size = self.group_size
        y = y if size == 1 else y.unflatten(0, (-1, size)).transpose(1, 2).flatten(1, 2)
        return y.transpose(1, 2)

    def bind_operator(self, operator, device: torch.device):
        """Continue with `operator`. A copied or unpickled model has another object than the one that began."""
        if self.recurrence.operator is not operator:
            self.recurrence = copy.copy(self.recurrence)
            self.recurrence.operator = operator
            self.select(lambda tensor: tensor.to(device))

    def max_crop(self) -> int:
        """The number of newest tokens that `crop` can remove."""
        return self.length if self.prompt is not None else self.recurrence.max_crop(self)

    def crop(self, count: int):
        """Return to the state `count` tokens ago, at most `max_crop`."""
        if self.prompt is None:
            self.recurrence.crop(self, count)
        else:
            self.prompt = self.prompt.select(lambda tensor: tensor[:, :-count])
        self.length -= count


def check_rows(held: int, given: int):
    """Raise a ValueError if the input has not as many rows as the cache."""
    if held != given:
        raise ValueError(
            f"The input must have {held} sequences, as `past_key_values` has, got {given}. Call "
            "batch_repeat_interleave or batch_select_indices of the cache first, or start with an empty cache."
        )


def is_closed(tensor: torch.Tensor) -> bool:
    """Whether nothing can be written into a tensor, because inference mode, which has ended, has made it."""
    return not is_traced() and tensor.is_inference() and not torch.is_inference_mode_enabled()


class Recurrence:
    """Base class of the decoding algorithms. They advance a `DecodingState`, all its sequences at once, by

        prefill(state, prompt)   make the state after the first inputs; a DivergenceError leaves it as it was
        step(state, x)           the output for one token, (B, D, 1) to (B, D, 1)
        chunk(state, x)          the outputs for several tokens, (B, D, L) to (B, D, L)
        max_crop(state)          the number of newest tokens that can be removed
        crop(state, count)       return to the state `count` tokens ago; `state.length` still counts them

    Attributes:
        operator: the causal operator that it decodes, or None after unpickling, which restores only the settings.
            Attributes whose names begin with `_` are computed from the parameters, when they are first read.
    """

    def __init__(self, operator):
        self.operator = operator

    def __deepcopy__(self, memo):
        return self  # copied states share it: it holds none

    def __getstate__(self) -> dict:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return settings | {"operator": None}

    def channel_major(self, v: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` to `(B, D, L)` in the dtype of the state; `(B, L, nG)` of groups to `(nB, G, L)`."""
        x, filters = v.transpose(1, 2).to(self.state_dtype(v)), self.operator.channels
        return x if x.shape[1] == filters else x.unflatten(1, (filters, -1)).transpose(1, 2).flatten(0, 1)

    def state_dtype(self, v: torch.Tensor) -> torch.dtype:
        """The dtype of the state for inputs `v`."""
        return compute_dtype(v.dtype)

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        """Whether a pass without gradients makes the state at once, to free the inputs: they take gigabytes at 100,000
        tokens. If the state is not much smaller, or takes time to make, it is made when the sequence is continued.
        """
        return False


class FilterRecurrence(Recurrence):
    """Exact decoding of any causal kernel by future fill. It has m = `taps` taps, or None if it has no end.

    `refill_phase` is the fraction by which the first block is shorter than the others.
    """

    _kernel: torch.Tensor | None = None
    _head: torch.Tensor | None = None

    def __init__(self, operator, taps: int | None, refill_phase: float):
        super().__init__(operator)
        self.taps = taps
        self.short = taps is not None and taps <= SHORT_KERNEL
        self.horizon, self.base = SHORT_BLOCKS if self.short else LONG_BLOCKS
        self.first_block = self.horizon - int(refill_phase * self.horizon)

    @property
    def looks_ahead(self) -> bool:
        """Whether a part of the next block is computed during the block before it."""
        return self.short and self.taps > 2 * self.horizon

    @cached_property
    def _spectra(self) -> dict[tuple[int, int, int], torch.Tensor]:
        """Transforms of parts of the kernel: their first tap, the one after their last, and the transform length."""
        return {}

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        return 2 * self._needed(prompt) <= prompt.length

    def prefill(self, state: DecodingState, prompt: Prompt):
        prompt = prompt.last(self._needed(prompt))
        x = self.channel_major(prompt.inputs())
        state.history = HistoryBuffer(x, None if self.taps is None else self.taps - 1)
        state.counters = Counters(block=self.first_block)

    def step(self, state: DecodingState, x: torch.Tensor) -> torch.Tensor:
        self.make_ready(state, x)
        position = state.counters.position
        state.history.append(x)
        recent = state.history.last(position % self.base + 1)  # (B, D, n)
        kernel = self.reversed_head(x)[:, -recent.shape[-1] :]  # (D, n)
        y = state.tensors["future"][..., position] + torch.linalg.vecdot(recent, kernel)  # (B, D)
        state.counters.position = position + 1
        return y[..., None]

    def make_ready(self, state: DecodingState, like: torch.Tensor):
        """Do the work before a step: a new block, a tile, or a part of the next block."""
        self.operator.require_positions(state.length + 1)
        counters = state.counters
        ends = counters.position == counters.block
        if ends:
            counters.block = self.horizon
        if ends or "future" not in state.tensors:
            state.history.align(counters.block)
            self.fill(state, like)
            counters.tiles = 0
        position, every = counters.position, max(1, self.horizon // PARTS)
        if position % self.base == 0 and counters.tiles < position:
            self.pass_on_tile(state, position & -position)
        if self.looks_ahead and is_on_host(like) and position % every == 0:
            channels, parts = like.shape[1], max(1, counters.block // every)  # the first block may be short
            until = min(channels, -(-channels * (position // every + 1) // parts))
            self.look_ahead(state, until, counters.block - position)

    def chunk(self, state: DecodingState, x: torch.Tensor) -> torch.Tensor:
        self.operator.require_positions(state.length + x.shape[-1])
        past = self.past(state)  # (B, D, P)
        y = self._continue(torch.cat([past, x], dim=-1), past.shape[-1], x.shape[-1])  # (B, D, L)
        state.history.append(x)
        state.tensors.pop("future", None)
        return y

    def max_crop(self, state: DecodingState) -> int:
        held, seen = state.history.held, state.length
        return min(seen, held) if held >= seen else max(0, held - self.taps + 1)

    def crop(self, state: DecodingState, count: int):
        state.history.drop(count)
        position = state.counters.position
        if "future" in state.tensors and self.base == self.horizon and count <= position:
            state.counters.position = position - count  # the future depends only on inputs before the block
        else:
            state.tensors.pop("future", None)

    def kernel(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The first `length` taps, `(D, length)`, zero beyond m."""
        needed = length if self.taps is None else min(length, self.taps)
        if self._kernel is None or self._kernel.shape[1] < needed:
            # The text grows, so the number of taps doubles each time, until all are computed.
            size = self.taps if self.short else 1 << (needed - 1).bit_length()
            self._kernel = self.operator.coefficients(size, like.device).to(like.dtype).contiguous()
        kernel = self._kernel[:, :needed]
        return kernel if needed == length else pad(kernel, (0, length - needed))

    def reversed_head(self, like: torch.Tensor) -> torch.Tensor:
        """The taps of the lags b - 1 .. 0, `(D, b)`."""
        if self._head is None:
            self._head = self.kernel(self.base, like).flip(1).contiguous()
        return self._head

    def _needed(self, prompt: Prompt) -> int:
        """The number of newest inputs that the state after a prompt depends on."""
        return prompt.length if self.taps is None else min(prompt.length, self.taps - 1 + slack_after(prompt.length))

    def past(self, state: DecodingState) -> torch.Tensor:
        """The past inputs that the next outputs depend on, `(B, D, P)`."""
        return state.history.last(self.reach(state))

    def reach(self, state: DecodingState) -> int:
        """The number of past inputs that the next outputs depend on."""
        return state.length if self.taps is None else self.taps - 1

    def fill(self, state: DecodingState, like: torch.Tensor):
        """Compute the future of a new block from the inputs before it."""
        if self.looks_ahead:
            finished = state.tensors.get("future")
            if finished is None:
                state.counters.ahead = 0
            self.look_ahead(state, like.shape[1], 0)
            recent, future = state.history.last(self.horizon), state.tensors["ahead"]
            self._continue(recent, self.horizon, self.horizon, keep=True, into=future)
            state.tensors |= {"future": future, "ahead": torch.empty_like(future) if finished is None else finished}
            state.counters.ahead = 0
        else:
            past = self.past(state)
            start = self.taps - 1 if self.short else past.shape[-1]  # one transform length for all fills
            state.tensors["future"] = self._continue(past, start, self.horizon, self.short)  # (B, D, H)
        state.counters.position = 0

    def look_ahead(self, state: DecodingState, until: int, remaining: int):
        """Compute what the inputs before the last H add to the next block, for the channels before `until`.

        `remaining` tokens come before that block.
        """
        done = state.counters.ahead
        if "ahead" not in state.tensors:
            buffer = state.history.buffer
            state.tensors["ahead"] = buffer.new_empty(*buffer.shape[:-1], self.horizon)  # (B, D, H)
        if done < until:
            reach, young = self.taps - 1 - self.horizon, self.horizon - remaining
            past = state.history.last(reach + young, slice(done, until))
            past = past[..., : max(0, past.shape[-1] - young)]
            ahead = state.tensors["ahead"][:, done:until].zero_()
            if past.shape[-1]:  # transforms of few lengths, which are short for a short text
                size = min(reach, max(self.horizon, 1 << (past.shape[-1] - 1).bit_length()))
                self._continue(past, size, self.horizon, keep=True, skip=self.horizon, first=done, into=ahead)
            state.counters.ahead = until

    def pass_on_tile(self, state: DecodingState, tile: int):
        """Add the newest `tile` inputs to as many outputs after them, as far as the block goes."""
        position = state.counters.position
        recent = state.history.last(tile)  # (B, D, U)
        added = self._continue(recent, tile, tile, keep=True)  # (B, D, U)
        until = min(position + tile, self.horizon)
        state.tensors["future"][..., position:until] += added[..., : until - position]
        state.counters.tiles = position  # tiles before this position have been passed on

    def _continue(self, x: torch.Tensor, start: int, count: int, keep=False, skip=0, first=0, into=None):
        """Outputs `start .. start + count - 1` of the kernel for `x` `(B, D, S)` and zeros after it, `(B, D, count)`.

        Before an `x` shorter than `start` stand zeros. The linear convolution ends at S + start + count. With a
        transform of at least S + count entries, the part that wraps around ends below `start`. So entries of the
        circular convolution before `start` are wrong, and the others are correct.

        Args:
            keep: store the spectrum for later calls with the same sizes.
            skip: the kernel begins with this tap, as if this number of zeros stood between `x` and the outputs.
            first: `x` holds channels from this one on.
            into: a tensor that the outputs are added to, and that is returned.
        """
        if x.shape[-1] < start:
            x = pad(x, (start - x.shape[-1], 0))
        into = x.new_zeros(*x.shape[:-1], count) if into is None else into
        if x.shape[0] == 0:
            return into  # MKL refuses transforms of empty tensors
        size = next_fast_len(x.shape[-1] + count)
        spectrum = self._spectra.get((skip, start + count, size))  # (D, F/2+1)
        if spectrum is None:
            kernel = self.kernel(skip + start + count, x)[:, skip:]
            if keep:
                spectrum = self._spectra[skip, start + count, size] = torch.fft.rfft(kernel, n=size)
        group = max(1, GROUP // (size * max(1, x.shape[0]))) if is_on_host(x) else x.shape[1]
        for channel in range(0, x.shape[1], group):
            product = torch.fft.rfft(x[:, channel : channel + group], n=size)  # (B, C, F/2+1)
            chosen = slice(first + channel, first + channel + product.shape[1])
            product *= torch.fft.rfft(kernel[chosen], n=size) if spectrum is None else spectrum[chosen]
            into[:, channel : channel + group] += torch.fft.irfft(product, n=size)[..., start : start + count]
        return into
