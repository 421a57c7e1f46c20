"""Decoding of a causal Toeplitz operator token by token: the contract, and exact decoding of any kernel.

    y_t = sum_{j=0}^{m-1} k_j v_{t-j}

B batch, D channels, L length of a chunk, m taps, T tokens seen, H horizon (a block of tokens), b base tile.

`FilterRecurrence` keeps the last m - 1 inputs. At the start of a block one transform computes what these inputs
add to all H outputs of the block (the future). Within the block a dot product with the first taps adds the inputs
since the last tile. A tile of U inputs (U is the lowest set bit of the position in the block, and at least b) is added
to the next U outputs by a transform of length 2U (relaxed multiplication: van der Hoeven 2002; Oncescu et al., "Flash
Inference", 2024; Agarwal et al., "FutureFill", 2024). With H = b there are no tiles, which is best for short kernels.
Kernels that never end (no decay) use a long horizon: their cost per token is nearly constant, but their state grows.
Layers start their blocks at different times, so that their transforms do not all happen at the same token.
"""

import torch
from torch.nn.functional import pad

from .history import SLACK, HistoryBuffer, places, put_rows, slack_after
from .numerics import compute_dtype, is_on_host, next_fast_len

# (horizon, base tile) for kernels up to this many taps, and for longer ones.
SHORT_KERNEL = 4096

SHORT_BLOCKS = (128, 128)

# The base tile in steps of fixed shape, which read a whole tile for each token, one number at a time on the CPU.
FIXED_BASE = 16

LONG_BLOCKS = (2048, 64)

# What the inputs before the last H tokens add to the next block of a short kernel is computed during the last block,
# for a part of the channels at a time, so that no token takes much longer than the others. So many parts make a block.
PARTS = 32

# On the CPU channels are transformed in groups of about this many numbers, so that temporaries stay in the cache.
GROUP = 2**18

# A recurrence reads a prompt in pieces of this many tokens, so that its temporaries do not grow with the prompt. Up to
# LONG_PROMPT tokens the inputs are kept: a state takes time to make, and most passes are never continued.
PIECE, LONG_PROMPT = 1024, 16384


class DivergenceError(ValueError):
    """A recurrence cannot decode, because its state becomes inexact or infinite."""


class Recurrence:
    """Base class of the decoding algorithms. It advances the state in a `TnnCacheLayer`, for all sequences at once.

    Attributes:
        operator: the causal operator that it decodes, or None after unpickling, which restores only the settings.

    Class attributes:
        has_fixed_step: whether it has `fixed_step`.
    """

    has_fixed_step = False

    def __init__(self, operator):
        self.operator = operator
        self.forget()

    def __deepcopy__(self, memo):
        return self  # a copied cache shares it: it holds no state

    def __getstate__(self) -> dict:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return settings | {"operator": None}

    def __setstate__(self, state: dict):
        vars(self).update(state)
        self.forget()

    def forget(self):
        """Begin without values that are computed from the parameters of the operator."""

    def settled(self) -> "Recurrence":
        """The recurrence that holds a state: this one, unless its settings follow from values of parameters."""
        return self

    @torch.no_grad()
    def advance(self, state, v: torch.Tensor) -> torch.Tensor:
        """The outputs `(B, L, D)` for the next inputs `v` `(B, L, D)`. It changes `state`, which `start` has made."""
        x = self.channel_major(v)  # (B, D, L)
        outputs = self.step(state, x) if x.shape[-1] == 1 else self.chunk(state, x)  # (B, D, L)
        return outputs.transpose(1, 2).to(v.dtype)

    def channel_major(self, v: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` to `(B, D, L)` in the dtype of the state."""
        return v.transpose(1, 2).to(compute_dtype(v.dtype))

    def is_early(self, prompt) -> bool:
        """Whether a pass without gradients makes the state after its `prompt` at once, so that the inputs are freed.

        Otherwise the inputs are kept, and the state is made when the text is continued. That is better if the state is
        not much smaller, or takes much time to make: most passes are never continued.
        """
        return False

    def start(self, state, prompt):
        """Make the state after the first inputs, a `cache_tnn.Prefill`.

        Raises:
            DivergenceError: the state cannot be computed. `state` has not changed.
        """
        raise NotImplementedError

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        """The output for one token, `(B, D, 1)` to `(B, D, 1)`. It changes `state`."""
        raise NotImplementedError

    def in_fixed_steps(self) -> "Recurrence":
        """This object, with the settings that are best for `fixed_step`. Called before the first step."""
        return self

    def make_ready(self, state, like: torch.Tensor):
        """Do the work before a step that depends on Python's counters, once. `like` is a column of the history."""

    def constants(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `fixed_step` reads of the operator, in tensors."""
        raise NotImplementedError

    def fixed_step(self, state, x: torch.Tensor) -> torch.Tensor:
        """`step` by operations on tensors alone, after `make_ready`; see `compile/static_cache.py`."""
        raise NotImplementedError

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        """The outputs for several tokens, `(B, D, L)` to `(B, D, L)`. It changes `state`."""
        raise NotImplementedError

    def max_crop(self, state) -> int:
        """The number of newest tokens that can be removed."""
        raise NotImplementedError

    def crop(self, state, count: int):
        """Return to the state `count` tokens ago."""
        raise NotImplementedError

    def put(self, state, other, rows: list[int]):
        """Give the `rows` of `state` the states of `other`, as `TnnCacheLayer.put` says. `other` is used up."""
        raise NotImplementedError

    def drop_padding(self, state, count: int):
        """Forget the first `count` tokens, which are padding in every row. `state.length` is without them already."""

    def compact(self, state):
        """Free the memory of values that only `crop` may need, but for those of the last 64 tokens."""

    def bytes_per_channel(self, tokens: int, dtype: torch.dtype) -> int:
        """The most bytes of state of a channel after `tokens` tokens that came one by one, for inputs of `dtype`."""
        raise NotImplementedError


class FilterRecurrence(Recurrence):
    """Exact decoding of any causal kernel by future fill.

    Args:
        operator: an operator with `coefficients(length)`.
        taps: number of taps m, or None if the kernel has no end.
        refill_phase: fraction by which the first block is shorter than the others.
    """

    has_fixed_step = True

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

    def forget(self):
        self._kernel: torch.Tensor | None = None
        self._head: torch.Tensor | None = None
        self._spectra: dict[tuple[int, int, int], torch.Tensor] = {}

    def is_early(self, prompt) -> bool:
        return 2 * self._needed(prompt) <= prompt.length  # else the copy takes time and frees little

    def start(self, state, prompt):
        prompt = prompt.last(self._needed(prompt))
        x = self.channel_major(prompt.inputs())
        state.history = HistoryBuffer(x, None if self.taps is None else self.taps - 1)
        state.counters = {"block": self.first_block}

    def step(self, state, x: torch.Tensor) -> torch.Tensor:
        self.make_ready(state, x)
        position = state.counters["position"]
        state.history.append(x)
        recent = state.history.last(position % self.base + 1)  # (B, D, n)
        kernel = self._reversed_head(x)[:, -recent.shape[-1] :]  # (D, n)
        y = state.tensors["future"][..., position] + torch.linalg.vecdot(recent, kernel)  # (B, D)
        state.counters["position"] = position + 1
        return y[..., None]

    def in_fixed_steps(self) -> "FilterRecurrence":
        self.base = min(self.base, FIXED_BASE)
        return self

    def constants(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self._reversed_head(like),)

    def fixed_step(self, state, x: torch.Tensor) -> torch.Tensor:
        """The dot product runs over all base tokens. Those before the tile, and lags beyond the kernel, count as 0."""
        buffer, (slot, position) = state.history.buffer, state.cursor.unbind()
        buffer.index_copy_(2, slot[None], x)
        lags = torch.arange(self.base - 1, -1, -1, device=x.device)  # (b,)
        places = torch.where(lags > slot, slot - lags + buffer.shape[-1], slot - lags)
        counts = lags <= position % self.base
        counts = counts if self.taps is None else counts & (lags < self.taps)
        added = torch.where(counts, buffer[..., places.clamp(min=0)] * state.constants[0], 0)  # (B, D, b)
        return state.tensors["future"][..., position[None]] + added.sum(-1, keepdim=True)

    def make_ready(self, state, like: torch.Tensor):
        """Do the work before a step: a new block, a tile, or a part of the next block."""
        counters = state.counters
        ends = counters.get("position") == counters["block"]
        if ends:
            counters["block"] = self.horizon
        if ends or "future" not in state.tensors:
            state.history.settle(counters["block"])
            self._fill(state, like)
            counters["tiles"] = 0
        position, every = counters["position"], max(1, self.horizon // PARTS)
        if position % self.base == 0 and counters["tiles"] < position:
            self._pass_on_tile(state, position & -position)
        if self.looks_ahead and is_on_host(like) and position % every == 0:
            channels, parts = like.shape[1], max(1, counters["block"] // every)  # the first block may be short
            until = min(channels, -(-channels * (position // every + 1) // parts))
            self._look_ahead(state, until, counters["block"] - position)

    def chunk(self, state, x: torch.Tensor) -> torch.Tensor:
        past = self._past(state)  # (B, D, P)
        y = self._continue(torch.cat([past, x], dim=-1), past.shape[-1], x.shape[-1])  # (B, D, L)
        state.history.append(x)
        state.tensors.pop("future", None)
        return y

    def max_crop(self, state) -> int:
        held, seen = state.history.held, state.length
        return min(seen, held) if held >= seen else max(0, held - self.taps + 1)

    def crop(self, state, count: int):
        state.history.drop(count)
        position = state.counters.get("position", 0)
        if "future" in state.tensors and self.base == self.horizon and count <= position:
            state.counters["position"] = position - count  # the future depends only on inputs before the block
        else:
            state.tensors.pop("future", None)

    def put(self, state, other, rows: list[int]):
        if "future" in state.tensors:
            self._take_place(other, state.counters)
        else:  # a new block begins for all
            for one in (state, other):
                one.tensors = {name: kept for name, kept in one.tensors.items() if name not in ("future", "ahead")}
        state.history.put(other.history, rows, shared_values(state, other))
        state.tensors = {name: put_rows(one, rows, other.tensors[name]) for name, one in state.tensors.items()}

    def compact(self, state):
        state.history.compact(state.length)

    def bytes_per_channel(self, tokens: int, dtype: torch.dtype) -> int:
        blocks = 2 if self.looks_ahead else 1
        held = places(None if self.taps is None else self.taps - 1, tokens) + blocks * self.horizon
        return held * compute_dtype(dtype).itemsize

    def kernel(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The first `length` taps, `(D, length)`, zero beyond m."""
        needed = length if self.taps is None else min(length, self.taps)
        if self._kernel is None or self._kernel.shape[1] < needed:
            # The text grows, so the number of taps doubles each time, until all are computed.
            size = self.taps if self.short else 1 << (needed - 1).bit_length()
            self._kernel = self.operator.coefficients(size, like.device).to(like.dtype).contiguous()
        kernel = self._kernel[:, :needed]
        return kernel if needed == length else pad(kernel, (0, length - needed))

    def _reversed_head(self, like: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            self._head = self.kernel(self.base, like).flip(1).contiguous()  # (D, b)
        return self._head

    def _needed(self, prompt) -> int:
        """The number of newest inputs that the state after a prompt depends on."""
        if self.taps is None:
            return prompt.length
        return min(prompt.length, self.taps - 1 + slack_after(prompt.length))

    def _past(self, state) -> torch.Tensor:
        return state.history.last(self._reach(state))

    def _reach(self, state) -> int:
        """The number of past inputs that the next outputs depend on."""
        return state.length if self.taps is None else self.taps - 1

    def _fill(self, state, like: torch.Tensor):
        """Compute the future of a new block from the inputs before it."""
        if self.looks_ahead:
            finished = state.tensors.get("future")
            if finished is None:
                state.counters["ahead"] = 0
            self._look_ahead(state, like.shape[1], 0)
            recent = self._padded(state.history.last(self.horizon), self.horizon)
            future = state.tensors["ahead"]
            self._continue(recent, self.horizon, self.horizon, keep=True, into=future)
            state.tensors["future"] = future
            state.tensors["ahead"] = torch.empty_like(future) if finished is None else finished
            state.counters["ahead"] = 0
        else:
            past = self._past(state)
            if self.short:  # one transform length for all fills
                past = self._padded(past, self.taps - 1)
            state.tensors["future"] = self._continue(past, past.shape[-1], self.horizon, self.short)  # (B, D, H)
        state.counters["position"] = 0

    def _take_place(self, state, counters: dict[str, int]):
        """Make the future of a state as if its block had begun when that of `counters` did."""
        position, tiles = counters["position"], counters["tiles"]
        values = state.history.last(state.history.held)
        values = self._padded(values, max(position, values.shape[-1]))
        before, within = values.split([values.shape[-1] - position, position], dim=-1)
        state.history, state.tensors = HistoryBuffer(before, state.history.reach), {}
        state.counters = {"block": counters["block"]}
        self._fill(state, values)
        for end in range(self.base, tiles + 1, self.base):
            state.history.append(within[..., end - self.base : end])
            state.counters["position"] = end
            self._pass_on_tile(state, end & -end)
        state.history.append(within[..., tiles:])
        if self.looks_ahead:
            self._look_ahead(state, counters["ahead"], counters["block"] - position)

    def _look_ahead(self, state, until: int, remaining: int):
        """Compute what the inputs before the last H add to the next block, for the channels before `until`.

        Args:
            remaining: number of tokens before the next block.
        """
        done = state.counters["ahead"]
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
                past = self._padded(past, size)
                self._continue(past, size, self.horizon, keep=True, skip=self.horizon, first=done, into=ahead)
            state.counters["ahead"] = until

    def _padded(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return pad(x, (length - x.shape[-1], 0))

    def _pass_on_tile(self, state, tile: int):
        position = state.counters["position"]
        recent = state.history.last(tile)  # (B, D, U)
        added = self._continue(recent, tile, tile, keep=True)  # (B, D, U)
        until = min(position + tile, self.horizon)
        state.tensors["future"][..., position:until] += added[..., : until - position]
        state.counters["tiles"] = position  # tiles before this position have been passed on

    def _continue(
        self,
        x: torch.Tensor,
        start: int,
        count: int,
        keep: bool = False,
        skip: int = 0,
        first: int = 0,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs `start .. start + count - 1` of the kernel applied to `x` `(B, D, S)` and zeros after it.

        The linear convolution ends at S + start + count. With a transform of at least S + count entries, the part that
        wraps around ends below `start`. So entries of the circular convolution before `start` are wrong, and the
        others are correct. With `keep` the spectrum is kept for later calls with the same sizes.

        Args:
            skip: the kernel begins with this tap, as if so many zeros stood between `x` and the outputs.
            first: `x` holds channels from this one on.
            into: a tensor that the outputs are added to, and that is returned.
        """
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


def shared_values(state, other, extra: int = 0) -> int:
    """How many values of each row the joined history of two states keeps.

    A history that begins with its text, or `extra` zeros before it, has zeros before. Others have no more than they
    hold. More than 64 values beyond what the next outputs need are left out.
    """
    both, reach = (state.history, other.history), state.history.reach
    cut = [one.history.held for one in (state, other) if one.history.held < one.length + extra]
    count = min(cut, default=max(history.held for history in both))
    return count if reach is None else min(count, reach + SLACK)
