"""The text of one answer: the scheduler's thread writes it, and the server's event loop takes pieces of it."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from modeling_tnn.serving.request import Request
from tnn_scripts.common.pieces import Pieces
from tnn_scripts.serving.errors import ApiError


class Text(BaseStreamer, StoppingCriteria):
    """A streamer and a stopping criterion: it decodes tokens as they come, and ends the text at a stop string.

    Special tokens are not in the text, but a stop string may be one, have one in it, or be a part of one. So stop
    strings are searched in the text with special tokens too, and a token that is a stop string is known by its id.

    Args:
        index: the number of the answer.
        prompt: the tokens before the text.
        stops: strings that end the text, and are not in it.
        news: gets this object after each token and at the end. Its event loop is the running one.

    Attributes:
        request: that of the scheduler, set by who submits it.
        times: of the beginning, and of each token, in seconds.
        is_late: whether it has been cancelled because its time was over.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        prompt: Sequence[int],
        stops: Sequence[str],
        news: asyncio.Queue,
    ):
        self.index, self.stops = index, stops
        self.request: Request | None = None
        self.is_late = False
        self.times = [time.perf_counter()]
        added = tokenizer.get_added_vocab() if stops else {}
        self._stop_ids = {added[stop] for stop in stops if stop in added}
        self._pieces = Pieces(tokenizer, prompt)
        self._full_pieces = Pieces(tokenizer, prompt, skip_special_tokens=False) if stops else None
        # The text, that with special tokens, the lengths of both before each token, and how much may be taken.
        self._written, self._full, self._lengths, self._ready = "", "", [(0, 0)], 0
        self._loop, self._news = asyncio.get_running_loop(), news
        self._end, self._taken, self._has_read = None, 0, False

    def put(self, value: torch.Tensor):
        """Take note of the time; the criterion decodes the token."""
        if self._has_read:
            self.times.append(time.perf_counter())
        self._has_read = True  # the prompt comes first

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **kwargs) -> torch.BoolTensor:
        """Whether a stop string has ended the text."""
        token = int(input_ids[0, -1])
        self._add(self._pieces.add(token), self._full_pieces.add(token) if self.stops else "", token in self._stop_ids)
        self._tell()
        return torch.tensor([self._end is not None])

    def end(self):
        """The text has ended."""
        self._tell()

    @property
    def is_done(self) -> bool:
        """Whether the text has ended, and all of it may be taken."""
        return self.request.is_done

    @property
    def error(self) -> Exception | None:
        """Why it was not finished, if it was not."""
        if self.request.reason != "cancelled":
            return self.request.error
        if self.is_late:
            return ApiError(504, "The text was not finished in the time that a request may take.", "timeout")
        return ApiError(503, "The text was not finished: the server is shutting down.", "shutting_down")

    @property
    def finish_reason(self) -> str | None:
        """Why the text has ended, in OpenAI's words."""
        if not self.is_done:
            return None
        return "length" if self.request.reason == "length" and self._end is None else "stop"

    def take(self) -> str:
        """What has been added since the last call. What may be the beginning of a stop string is held back."""
        if self.is_done and self._end is None:
            self._add(self._pieces.finish(), self._full_pieces.finish() if self.stops else "")
            self._ready = len(self._written) if self._end is None else self._end
        piece, self._taken = self._written[self._taken : self._ready], max(self._taken, self._ready)
        return piece

    def _add(self, piece: str, full: str, is_stop: bool = False):
        """Add what a token has brought to both texts, and find the first stop string that ends in it."""
        written, searched = len(self._written), len(self._full)
        self._lengths.append((searched, written))
        self._written += piece
        self._full += full
        places = [written] * is_stop
        for stop in self.stops:
            places.append(self._written.find(stop, max(0, written - len(stop) + 1)))
            if (place := self._full.find(stop, max(0, searched - len(stop) + 1))) >= 0:
                places.append(self._place(place))
        self._end = min((place for place in places if place >= 0), default=None)
        self._ready = self._safe() if self._end is None else self._end

    def _place(self, full: int) -> int:
        """The place in the text of a place in the one with special tokens."""
        number = bisect_right(self._lengths, full, key=lambda lengths: lengths[0])
        searched, written = self._lengths[number - 1]
        following = self._lengths[number][1] if number < len(self._lengths) else len(self._written)
        return min(written + full - searched, following)

    def _safe(self) -> int:
        """Where the text ends that no further token can make a part of a stop string."""
        written, full = (len(text) - self._held_back(text) for text in (self._written, self._full))
        return min(written, self._place(full)) if self.stops else written

    def _held_back(self, text: str) -> int:
        lengths = (length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(lengths, default=0)

    def _tell(self):
        self._loop.call_soon_threadsafe(self._news.put_nowait, self)
