"""The thread that writes all texts of a server, a step of the scheduler after the other, and one of its texts."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from modeling_tnn.serving.request import Request
from modeling_tnn.serving.scheduler import BatchScheduler
from tnn_programs.serving.pieces import Pieces

logger = logging.getLogger("api")


class Engine:
    """A `BatchScheduler` with these `limits` that runs in a thread while there is something to write."""

    def __init__(self, model: PreTrainedModel, **limits):
        self.scheduler = BatchScheduler(model, **limits)
        self._awake, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="tnn-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether texts are being written."""
        return self._thread.is_alive()

    def submit(self, ids: list[int], seed: int | None, **options) -> Request:
        """`BatchScheduler.submit` for a prompt of token ids, with its errors."""
        prompt = torch.tensor([ids], device=self.scheduler.model.device)
        request = self.scheduler.submit(prompt, seed=seed, attention_mask=torch.ones_like(prompt), **options)
        self._awake.set()
        return request

    def cancel(self, request: Request):
        """End a text at the next step."""
        self.scheduler.cancel(request)
        self._awake.set()

    def close(self):
        """End all texts and the thread."""
        self._is_closed = True
        self._awake.set()
        self._thread.join()
        self.scheduler.end_all()

    def _run(self):
        while not self._is_closed:
            if not self.scheduler.has_work:
                self._awake.wait()
            self._awake.clear()
            try:
                self.scheduler.step()
            except Exception as error:  # of no single text: all end, and the next ones begin afresh
                logger.exception("A step has failed")
                self.scheduler.end_all("error", error)


class Piece(NamedTuple):
    """New text since the last call: a string, its tokens, and the reason for the end, if it has ended."""

    text: str
    tokens: slice
    finish_reason: str | None


class Text(BaseStreamer, StoppingCriteria):
    """The text of one answer, which the engine writes and the server's event loop takes in pieces.

    As a streamer and a stopping criterion it decodes tokens as they come, and ends the text at a stop string.

    Args:
        index: the number of the answer.
        prompt: the tokens before the text.
        stops: strings that end the text, and are not in it; a special token is one too.
        news: gets this object after each token and at the end, in the event `loop`, the running one unless given.
        echo: stands before the text.
        is_empty: leave out what is written. A text has one token at least, also where none is asked for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, index: int, prompt: Sequence[int], stops: Sequence[str],
        news: asyncio.Queue, loop: asyncio.AbstractEventLoop | None = None, echo: str = "", is_empty: bool = False,
    ):  # fmt: skip
        self.index, self.stops, self.echo, self.is_empty = index, stops, echo, is_empty
        self.request: Request | None = None  # set by who submits it
        self.is_late, self._has_read = False, False  # late: its time was over
        self.times = [time.perf_counter()]  # of the beginning, and of each token
        added = tokenizer.get_added_vocab() if stops else {}
        self._stop_ids = {added[stop] for stop in stops if stop in added}  # whose text is left out
        self._pieces = Pieces(tokenizer, prompt)
        # The text, how much of it was taken and may be taken, and the place of the first stop string.
        self._written, self._taken, self._ready, self._end = echo, 0, len(echo), None
        self.offsets: list[int] = []  # where each token begins in the text
        self._told = 0  # tokens
        self._loop, self._news = loop or asyncio.get_running_loop(), news

    def put(self, value: torch.Tensor):
        """Take note of the time; the criterion decodes the token."""
        if self._has_read:
            self.times.append(time.perf_counter())
        self._has_read = True  # the prompt comes first

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **kwargs) -> torch.BoolTensor:
        """Whether a stop string has ended the text."""
        token = int(input_ids[0, -1])
        if not self.is_empty:
            offset = len(self._written)
            self._add(self._pieces.add(token), token in self._stop_ids)
            self.offsets.append(offset)
        self.end()
        return torch.tensor([self._end is not None])

    def end(self):
        """Tell the event loop that there is something new."""
        self._loop.call_soon_threadsafe(self._news.put_nowait, self)

    @property
    def is_done(self) -> bool:
        """Whether the text has ended, and all of it may be taken."""
        return self.request.is_done

    def take(self) -> Piece:
        """Return the text added since the last call. A possible beginning of a stop string is held back."""
        reason = self.request.reason  # read once: the engine may end the text at any time
        if reason is not None:
            if self._end is None:
                self._add(self._pieces.finish())
                self._ready = len(self._written) if self._end is None else self._end
            is_cut = self.is_empty or (reason == "length" and self._end is None)
            reason = "length" if is_cut else "stop"
        text, self._taken = self._written[self._taken : self._ready], max(self._taken, self._ready)
        tokens, self._told = slice(self._told, len(self.offsets)), len(self.offsets)
        return Piece(text, tokens, reason)

    def _add(self, piece: str, is_stop: bool = False):
        """Add what a token has brought, and find the first stop string that ends in it."""
        before = len(self._written)
        self._written += piece
        begin = len(self.echo)
        places = [self._written.find(stop, max(begin, before - len(stop) + 1)) for stop in self.stops]
        self._end = min((place for place in [*places, before if is_stop else -1] if place >= 0), default=None)
        begun = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        held_back = max((len(part) for part in begun if self._written.endswith(part)), default=0)
        self._ready = len(self._written) - held_back if self._end is None else self._end
