"""A buffer of the last values of a sequence. The newest values can be removed again.

B batch, D channels, C capacity. The values lie in one buffer `(B, D, C)`, new ones after older ones. A short buffer
moves the values still needed to its front when it is full. A long one is a ring, where a new value overwrites the
oldest one: to move thousands of values would make one token slow. Without a bound the buffer grows.
"""

import torch
from torch.nn.functional import pad

# Number of newest values that `drop` can always remove: the buffer stores as many more than the reader needs.
# The second number is the most after a chunk, and that of assisted decoding.
SLACK, CHUNK_SLACK = 64, 1024

# Free places after the values of a buffer that is not a ring, or not yet as long as it will be.
ROOM, LONG_ROOM = 32, 128

# A buffer whose reader needs more values is a ring. Its length is a multiple of the second number, so that a reader
# whose blocks have this length finds each block in one piece.
LONG_REACH, ALIGNMENT = 512, 128

# Unbounded buffers grow by 1/8: amortised O(1) per token without over-allocating on long sequences.
GROWTH = 8


def slack_after(count: int) -> int:
    """The number of newest values that can be removed after a chunk of `count` values."""
    return max(SLACK, min(count, CHUNK_SLACK))


class HistoryBuffer:
    """The last `reach` values of a sequence, which the reader needs (None: all), and some older ones.

    `first` `(B, D, S)` are the values so far, S >= 0.
    """

    buffer: torch.Tensor  # (B, D, C)
    end: int  # the place after that of the newest value; the next one is written there, or at the front after C
    held: int  # number of values in the buffer
    is_fixed: bool  # whether the buffer keeps its length
    slack = SLACK  # number of newest values that can be removed at any time

    def __init__(self, first: torch.Tensor, reach: int | None):
        self.reach, self.is_fixed = reach, False
        self.buffer, self.end, self.held = first[..., :0], 0, 0
        self.append(first)

    def __getstate__(self) -> dict:
        """The state without the free places, whose memory may hold unrelated data."""
        return vars(self) | {"buffer": self.last(self.held).clone(), "end": self.held, "is_fixed": False}

    @property
    def is_ring(self) -> bool:
        """Whether new values overwrite the oldest ones in place."""
        return self.reach is not None and self.reach > LONG_REACH

    @property
    def wanted(self) -> int | None:
        """The number of values to hold while they come one by one; None for all."""
        return None if self.reach is None else self.reach + self.slack

    def append(self, values: torch.Tensor):
        """Append `(B, D, S)` new values."""
        new = values.shape[-1]
        wanted = None if self.reach is None else self.reach + max(self.slack, slack_after(new))
        if wanted is not None and new > wanted:
            values, new = values[..., -wanted:], wanted
            self.buffer, self.end, self.held = values[..., :0], 0, 0
        self.make_room(new, wanted)
        capacity = self.buffer.shape[-1]
        start = self.end % max(1, capacity)
        until_end = min(new, capacity - start)
        self.buffer[..., start : start + until_end] = values[..., :until_end]
        if until_end < new:
            self.buffer[..., : new - until_end] = values[..., until_end:]
        self.end = start + new if until_end == new else new - until_end
        self.held = min(self.held + new, capacity)

    def last(self, count: int, channels: slice = slice(None)) -> torch.Tensor:
        """The newest `count` values or all, `(B, D, <= count)`: a view, or a copy over the end of a ring."""
        start = self.end - min(count, self.held)
        if start >= 0:
            return self.buffer[:, channels, start : self.end]
        older = self.buffer[:, channels, start:]
        return torch.cat([older, self.buffer[:, channels, : self.end]], dim=-1) if self.end else older

    def drop(self, count: int):
        """Remove the newest `count` values. The caller checks that enough values remain."""
        self.end -= count
        if self.end < 0:
            self.end += self.buffer.shape[-1]
        self.held -= count

    def align(self, block: int):
        """Give a ring the length for values that come one by one. The next `block` of them will lie in one piece."""
        if self.is_ring and not self.is_fixed:
            longest, capacity = aligned(self.wanted), self.buffer.shape[-1]
            fits = min(longest, self.held + block) <= capacity <= longest
            if not fits or capacity % ALIGNMENT or (self.end + block) % ALIGNMENT:
                self.move(min(longest, aligned(self.held + max(ALIGNMENT, self.held))), -block % ALIGNMENT)

    def make_room(self, new: int, wanted: int | None):
        """Make the buffer so long that `new` values fit, and that it holds `wanted` values (None: all).

        A single value gives back the places that a chunk or a prompt has left for `crop`.
        """
        capacity = self.buffer.shape[-1]
        spare = new == 1 and wanted is not None and not self.is_ring and capacity > wanted + ROOM
        if (self.held + new <= capacity and not spare) or (self.is_ring and capacity >= wanted):
            return
        kept = self.last(self.held if wanted is None else wanted - new)
        count = kept.shape[-1] + new
        buffer = kept.new_empty(*kept.shape[:-1], count + self.room(count, wanted))
        buffer[..., : kept.shape[-1]] = kept
        self.buffer, self.end, self.held = buffer, kept.shape[-1], kept.shape[-1]

    def move(self, capacity: int, end: int = 0):
        """Move the newest values to a buffer of this length: in a ring before the place `end`, else to its front."""
        kept = self.last(capacity if self.is_ring or self.reach is None else min(capacity, self.wanted))
        buffer, count = kept.new_empty(*kept.shape[:-1], capacity), kept.shape[-1]
        end = end if self.is_ring else count
        young = min(end, count)
        buffer[..., end - young : end] = kept[..., count - young :]
        buffer[..., capacity - (count - young) :] = kept[..., : count - young]
        self.buffer, self.end, self.held = buffer, end, count

    def room(self, count: int, wanted: int | None) -> int:
        """The free places beside `count` values."""
        if wanted is None:
            return max(LONG_ROOM, count // GROWTH)
        if self.is_ring:
            return 0 if count == wanted else LONG_ROOM
        return ROOM

    def freeze_capacity(self, longest: int | None, count: int = 1):
        """Give the buffer the length that it keeps for single values, `longest` in all, and make room for `count`."""
        self.is_fixed = True
        capacity = self.buffer.shape[-1]
        if self.is_ring:
            slots = aligned(self.wanted)
            if longest is not None and self.held < longest:
                slots = min(slots, aligned(longest))
        else:
            slots = max(longest or 0, capacity) if self.wanted is None else self.wanted + ROOM
        if capacity != slots:
            self.move(slots)
        self.make_room(count, self.wanted)

    def next_slots(self, count: int) -> list[int]:
        """Count values that the caller writes at the slots returned. `freeze_capacity` has made room for them."""
        self.previous, capacity = (self.end, self.held), self.buffer.shape[-1]
        slots = [(self.end + i) % capacity for i in range(count)]
        self.end, self.held = slots[-1] + 1, min(self.held + count, capacity)
        return slots

    def insert_rows(self, other: "HistoryBuffer", rows: list[int], count: int):
        """Give the `rows` the newest `count` values of `other`, and keep as many of each row; see `write_rows`.

        Zeros stand before the values of a row that has fewer.
        """
        if count > self.held:
            self.buffer = pad(self.last(self.held), (count - self.held, self.room(count, self.wanted)))
            self.end = count
        self.held = count
        values, young = other.last(count), min(self.end, count)
        values = pad(values, (count - values.shape[-1], 0))  # (N, D, count)
        self.buffer = write_rows(self.buffer, rows, values[..., count - young :], self.end - young)
        if young < count:  # the ring begins before its front
            old = values[..., : count - young]
            self.buffer = write_rows(self.buffer, rows, old, self.buffer.shape[-1] - old.shape[-1])

    def compact(self, count: int):
        """Keep at most the newest `count` values, if the buffer has more slots than for so many one by one."""
        if self.buffer.shape[-1] > slots_after(self.reach, count):
            self.move(min(count, self.held, count if self.wanted is None else self.wanted))


def write_rows(tensor: torch.Tensor, rows: list[int], values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """`tensor` `(B, ..., C)` with `values` `(N, ..., S)` in the `rows`, from column `first` on.

    It is changed in place, unless rows from B on ask for more of them.
    """
    if max(rows) >= len(tensor):
        grown = tensor.new_empty(max(rows) + 1, *tensor.shape[1:])
        grown[: len(tensor)] = tensor
        tensor = grown
    for row, value in zip(rows, values, strict=True):
        tensor[row, ..., first : first + value.shape[-1]] = value
    return tensor


def slots_after(reach: int | None, count: int) -> int:
    """The most slots of a buffer after `count` values that came one by one."""
    if reach is None:
        return count + max(LONG_ROOM, count // GROWTH)
    if reach <= LONG_REACH:
        return reach + SLACK + ROOM
    return min(aligned(reach + SLACK), aligned(2 * max(ALIGNMENT, count)))


def aligned(count: int) -> int:
    """The least multiple of `ALIGNMENT` from `count` on."""
    return -(-count // ALIGNMENT) * ALIGNMENT
