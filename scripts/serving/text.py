"""The text of one answer: the scheduler's thread writes it, and the server's event loop takes pieces of it."""

import asyncio
import time
from collections.abc import Sequence

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from modeling_tnn.request import Request


class Text(BaseStreamer, StoppingCriteria):
    """A streamer and a stopping criterion: it decodes tokens as they come, and ends the text at a stop string.

    Args:
        index: the number of the answer.
        stops: strings that end the text, and are not in it.
        news: gets this object after each token and at the end. Its event loop is the running one.

    Attributes:
        request: that of the scheduler, set by who submits it.
        times: of the beginning, and of each token, in seconds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, index: int, stops: Sequence[str], news: asyncio.Queue):
        self.tokenizer, self.index, self.stops = tokenizer, index, stops
        self.request: Request | None = None
        self.times = [time.perf_counter()]
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._loop, self._news = asyncio.get_running_loop(), news
        self._written, self._end, self._taken, self._has_read = "", None, 0, False

    def put(self, value: torch.Tensor):
        """Take note of the time; the criterion decodes the token."""
        if self._has_read:
            self.times.append(time.perf_counter())
        self._has_read = True  # the prompt comes first

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **kwargs) -> torch.BoolTensor:
        """Whether a stop string has ended the text."""
        piece = self._decoder.step(self.tokenizer.backend_tokenizer, int(input_ids[0, -1])) or ""
        start = len(self._written)
        self._written += piece
        places = [self._written.find(stop, max(0, start - len(stop) + 1)) for stop in self.stops if piece]
        self._end = min((place for place in places if place >= 0), default=None)
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
    def finish_reason(self) -> str | None:
        """Why the text has ended, in OpenAI's words."""
        if not self.is_done:
            return None
        return "length" if self.request.reason == "length" and self._end is None else "stop"

    def take(self) -> str:
        """What has been added since the last call. What may be the beginning of a stop string is held back."""
        done, text = self.is_done, self._written
        if self._end is not None:
            text = text[: self._end]
        elif done:
            text = self._whole(text)
        else:
            text = text[: len(text) - self._held_back(text)]
        piece, self._taken = text[self._taken :], max(self._taken, len(text))
        return piece

    def _whole(self, text: str) -> str:
        """The decoded tokens, which may end within a character."""
        whole = self.tokenizer.decode(self.request.tokens, skip_special_tokens=True)
        return whole if whole.startswith(text) else text

    def _held_back(self, text: str) -> int:
        lengths = (length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(lengths, default=0)

    def _tell(self):
        self._loop.call_soon_threadsafe(self._news.put_nowait, self)
