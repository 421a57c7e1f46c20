"""The last values of a sequence, from which the newest can be taken back.

B batch, D channels, C capacity. The values lie in one buffer `(B, D, C)`, newest last; appending writes behind them,
and only when the buffer is full are those still needed moved to its front (or, without a bound, is it enlarged).
"""

import torch

# How many of the newest values can be taken back at any time, beyond what the reader needs.
SLACK = 64

# How many after a chunk of several values, if it was that long.
CHUNK_SLACK = 1024

# Free places behind the values when the buffer is made; each refill of a long one moves much.
ROOM, LONG_ROOM, LONG_REACH = 32, 128, 512


class HistoryBuffer:
    """The last `reach` values of a sequence and some older ones.

    Args:
        first: `(B, D, S)`, the values so far, S >= 0.
        reach: how many values the reader looks back; None for all.
    """

    def __init__(self, first: torch.Tensor, reach: int | None):
        self.reach, self.lent = reach, False
        self.buffer, self.end = first[..., :0], 0
        self._append(first, SLACK)

    def __getstate__(self) -> dict:
        """Without the free places: what was in their memory is nobody's business."""
        return vars(self) | {"buffer": self.buffer[..., : self.end].clone(), "lent": False}

    def append(self, values: torch.Tensor):
        """Take in `(B, D, S)` new values, S >= 1."""
        self._append(values, max(SLACK, min(values.shape[-1], CHUNK_SLACK)))

    def last(self, count: int) -> torch.Tensor:
        """The newest `count` values or as many as there are, `(B, D, <= count)`, the newest last. A view."""
        return self.buffer[..., max(0, self.end - count) : self.end]

    def lend(self, count: int) -> torch.Tensor:
        """`last` for a reader that keeps it, such as a backward pass: no later value is written into it."""
        self.lent = True
        return self.last(count)

    def drop(self, count: int):
        """Take back the newest `count` values; the caller knows that enough remain."""
        if self.lent:
            self.buffer, self.lent = self.buffer.clone(), False
        self.end -= count

    def select(self, choose):
        """Apply `choose`, a function of a tensor along its batch dimension."""
        self.buffer = choose(self.buffer)

    def _room(self, count: int) -> int:
        if self.reach is None:
            return max(LONG_ROOM, count)  # doubling
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
