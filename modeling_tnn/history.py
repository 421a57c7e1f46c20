"""A buffer of the last values of a sequence. The newest values can be removed again.

B batch, D channels, C capacity. The values lie in one buffer `(B, D, C)`, the newest last. New values are written
after them. When the buffer is full, the values still needed move to its front (or, without a bound, the buffer grows).
"""

import torch

# Number of newest values that can be removed at any time: so many older values are kept beyond those the reader needs.
SLACK = 64

# The same number after a chunk of at least this many values.
CHUNK_SLACK = 1024

# Free places after the values when the buffer is made. A long buffer gets more, because each refill copies it.
ROOM, LONG_ROOM, LONG_REACH = 32, 128, 512

# A buffer without a bound gets free places for this part of its values: few, because the values of a long text are
# gigabytes, and enough that the copies cost each token a constant time.
GROWTH = 8


def slack_after(count: int) -> int:
    """The number of newest values that can be removed after a chunk of `count` values."""
    return max(SLACK, min(count, CHUNK_SLACK))


class HistoryBuffer:
    """The last `reach` values of a sequence and some older ones.

    Args:
        first: `(B, D, S)`, the values so far, S >= 0.
        reach: number of values that the reader needs; None for all.
    """

    def __init__(self, first: torch.Tensor, reach: int | None):
        self.reach, self.lent = reach, False
        self.buffer, self.end = first[..., :0], 0
        self.append(first)

    def __getstate__(self) -> dict:
        """The state without the free places, whose memory may hold unrelated data."""
        return vars(self) | {"buffer": self.buffer[..., : self.end].clone(), "lent": False}

    def append(self, values: torch.Tensor):
        """Append `(B, D, S)` new values."""
        self._append(values, slack_after(values.shape[-1]))

    def last(self, count: int) -> torch.Tensor:
        """A view of the newest `count` values, or of all if there are fewer, `(B, D, <= count)`, the newest last."""
        return self.buffer[..., max(0, self.end - count) : self.end]

    def lend(self, count: int) -> torch.Tensor:
        """`last` for a reader that keeps the view, such as a backward pass: no later value is written into it."""
        self.lent = True
        return self.last(count)

    def drop(self, count: int):
        """Remove the newest `count` values. The caller checks that enough values remain."""
        if self.lent:
            self.buffer, self.lent = self.buffer.clone(), False
        self.end -= count

    def select(self, choose):
        """Apply `choose`, a function of a tensor along its batch dimension."""
        self.buffer = choose(self.buffer)

    def _room(self, count: int) -> int:
        if self.reach is None:
            return max(LONG_ROOM, count // GROWTH)
        return LONG_ROOM if self.reach > LONG_REACH else ROOM

    def _append(self, values: torch.Tensor, slack: int):
        new = values.shape[-1]
        if self.end + new > self.buffer.shape[-1]:
            wanted = self.end + new if self.reach is None else self.reach + slack
            kept = self.last(max(0, wanted - new))
            values = values[..., -wanted:] if wanted < new else values
            held, new = kept.shape[-1], values.shape[-1]
            buffer = values.new_empty(*values.shape[:-1], held + new + self._room(held + new))
            buffer[..., :held] = kept
            self.buffer, self.end = buffer, held
        self.buffer[..., self.end : self.end + new] = values
        self.end += new
