"""Many texts at once: one forward pass for each token of all of them, while texts come and go.

    waiting  ->  reading (prompts, left-padded, a chunk in each step)  ->  writing (rows of one cache)  ->  done

The tokens of a text are those of `generate`, whatever else runs. transformers prepares the settings of each text, and
its processors, warpers and stopping criteria are applied row by row, with the random numbers of that text. Texts that
have read their prompt are put into the rows of those that have ended, or into new ones (see `serving/rows.py`).

A row that has ended runs on until another text takes it, or a quarter of all rows has ended: to remove it would copy
the states of the others.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from transformers.cache_utils import DynamicCache

from ..cache_tnn import memory_per_sequence
from ..configuration_tnn import has_attention
from .request import Request, prepare
from .rows import bytes_of_text, drop_padding, put_texts
from .states import can_be_put

logger = logging.getLogger(__name__)

# Prompts are read together if padding is at most half of them, or so few tokens.
LITTLE_PADDING = 256

# Rows are removed when one of so many has ended.
SHARE_OF_ENDED = 4


class QueueFullError(RuntimeError):
    """So many texts are waiting that no other one is taken."""


class BatchScheduler:
    """Writes many texts at once with a `TnnForCausalLM` in evaluation mode.

    `submit` and `cancel` may be called from any thread, `step` and what calls it from one at a time.

    Args:
        max_batch_size: the most texts that are read or written at the same time.
        memory_limit: the most bytes of decoding states of these texts; None for no limit. A pass over prompts needs
            memory besides, which `prefill_tokens` limits.
        prefill_tokens: the most tokens of prompts in a step, padding included. Fewer of them let the other texts wait
            less for a long prompt.
        max_waiting: the most texts that wait for their turn; None for no limit.

    Attributes:
        state_bytes: the bytes of the decoding states that were held after the latest step.

    Raises:
        ValueError: the model is bidirectional, or has an operator whose states cannot be put into rows.

    Example:
        >>> scheduler = BatchScheduler(model, memory_limit=2**30)
        >>> requests = [scheduler.submit(prompt, max_new_tokens=20, do_sample=True, seed=0) for prompt in prompts]
        >>> for token in scheduler.stream(requests[0]):  # the others advance too
        ...     print(tokenizer.decode(token))
    """

    def __init__(
        self,
        model,
        max_batch_size: int = 32,
        memory_limit: int | None = None,
        prefill_tokens: int = 2048,
        max_waiting: int | None = None,
    ):
        given = {"max_batch_size": max_batch_size, "prefill_tokens": prefill_tokens}
        given |= {"memory_limit": memory_limit or 1, "max_waiting": max_waiting or 1}
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number from 1 up, got {value!r}")
        self.model = model
        check_operators(self._decoder)
        self.max_batch_size, self.memory_limit = max_batch_size, memory_limit
        self.prefill_tokens, self.max_waiting = prefill_tokens, max_waiting
        self._needs_mask = has_attention(model.config) or model.config.position_embedding == "sinusoidal"
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._reading: Reading | None = None
        self._empty()
        self.state_bytes = 0

    def submit(self, input_ids: torch.Tensor, seed: int | None = None, **options) -> Request:
        """Queue a text.

        Args:
            input_ids: the prompt, `(1, L)` or `(L,)`.
            seed: that of the random numbers of this text. `torch.manual_seed(seed)` before `generate` gives the same.
            options: those of `generate` for greedy search and sampling, such as `max_new_tokens`, `do_sample`,
                `stopping_criteria` and `streamer`. `stop_strings` are a `StopStringCriteria` among the criteria.

        Raises:
            QueueFullError: `max_waiting` texts are waiting.
            TypeError, ValueError: those of `generate`; a beam search or the like; the state of the text alone is above
                `memory_limit`.
        """
        prompt = input_ids[None] if isinstance(input_ids, torch.Tensor) and input_ids.dim() == 1 else input_ids
        request = prepare(self.model, prompt, seed, **options)
        if self._is_above_limit([request]):
            needed = bytes_of_text(self._decoder, request.max_length)
            raise ValueError(
                f"`memory_limit` must be at least {needed:,} bytes for a text of {request.max_length:,} tokens, got "
                f"{self.memory_limit:,}"
            )
        with self._lock:
            if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
                raise QueueFullError(f"{self.max_waiting} texts are waiting for their turn. Try again later.")
            self._waiting.append(request)
        return request

    def cancel(self, request: Request):
        """End a text at the next step, with the tokens that it has."""
        request.is_cancelled = True

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of a text as they are written; all texts advance meanwhile.

        Raises:
            Exception: the error that ended the text.
        """
        given = 0
        while True:
            yield from request.tokens[given:]
            given = len(request.tokens)
            if request.is_done:
                break
            self.step()
        if request.error is not None:
            raise request.error

    def generate(self, prompts: Iterable[torch.Tensor], seeds: Iterable[int] | None = None, **options) -> list:
        """The new tokens after each of the prompts, a list of integers for each.

        Raises:
            Exception: those of `submit` and `stream`.
        """
        prompts = list(prompts)
        pairs = zip(prompts, [None] * len(prompts) if seeds is None else seeds, strict=True)
        requests = [self.submit(prompt, seed, **options) for prompt, seed in pairs]
        return [list(self.stream(request)) for request in requests]

    def step(self) -> bool:
        """Read a chunk of prompts, write one token of each running text; whether there is more to do."""
        with torch.no_grad():
            self._end_cancelled()
            self._begin_reading()
            if self._running():
                self._write()
            if self._reading is not None:
                self._read()
        self.state_bytes = self._held_bytes()
        return self.has_work

    def end_all(self, reason: str = "cancelled", error: Exception | None = None):
        """End all texts, those that wait too."""
        with self._lock:
            waiting = [*self._waiting]
            self._waiting.clear()
        for request in [*waiting, *self._active()]:
            request.end(reason, error)
        self._reading = None
        self._empty()

    def run(self):
        """Take steps until all texts have ended."""
        while self.step():
            pass

    @property
    def has_work(self) -> bool:
        """Whether a text has not ended."""
        return bool(self._waiting or self._reading or self._running())

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of texts that are read or written."""
        return len(self._active())

    def _held_bytes(self) -> int:
        caches = [(self._cache, len(self._rows))]
        caches += [(self._reading.cache, len(self._reading.requests))] if self._reading else []
        return sum(count * memory_per_sequence(cache) for cache, count in caches)

    @property
    def _decoder(self):
        return self.model.get_decoder()

    def _empty(self):
        self._cache, self._rows, self._mask = DynamicCache(), [], None

    def _running(self) -> list[Request]:
        return [request for request in self._rows if not request.is_done]

    def _active(self) -> list[Request]:
        reading = self._reading
        return self._running() + ([] if reading is None else reading.active())

    def _is_above_limit(self, requests: list[Request], rows: int = 0) -> bool:
        """Whether the states of these texts, in so many rows or more, may exceed the limit."""
        if self.memory_limit is None:
            return False
        longest = max(request.max_length for request in requests)  # all rows have its length
        return max(rows, len(requests)) * bytes_of_text(self._decoder, longest) > self.memory_limit

    def _end_cancelled(self):
        with self._lock:
            for request in [one for one in self._waiting if one.is_cancelled]:
                self._waiting.remove(request)
                request.end("cancelled")
        for request in self._active():
            if request.is_cancelled:
                request.end("cancelled")
        if self._reading is not None and not self._reading.active():
            self._reading = None
        self._remove_ended()

    def _remove_ended(self):
        """Remove the rows of texts that have ended, if they are many."""
        ended = sum(request.is_done for request in self._rows)
        if ended == len(self._rows):
            self._empty()
        elif SHARE_OF_ENDED * ended >= len(self._rows):
            self._compact()

    def _compact(self):
        kept = [row for row, request in enumerate(self._rows) if not request.is_done]
        if kept and len(kept) < len(self._rows):
            self._cache.batch_select_indices(torch.tensor(kept, device=self.model.device))
            self._rows = [self._rows[row] for row in kept]
            self._align()

    def _align(self):
        """Drop the padding that all texts have, and make their mask."""
        longest = max(request.length for request in self._running()) - 1  # the newest token has not been read
        drop_padding(self._cache, int(self._cache.get_seq_length()) - longest)
        if self._needs_mask:
            self._mask = left_padded([request.mask()[:-1] for request in self._rows], longest)

    def _begin_reading(self):
        """Let as many texts as have room read their prompts, those first that came first."""
        if self._reading is not None:
            return
        chosen: list[Request] = []
        with self._lock:
            while self._waiting and self._has_room(chosen, self._waiting[0]):
                chosen.append(self._waiting.popleft())
                if chosen[0].is_suspect:
                    break
        if chosen:
            self._reading = Reading(chosen)

    def _has_room(self, chosen: list[Request], request: Request) -> bool:
        everyone = [*self._running(), *chosen, request]
        if len(everyone) > self.max_batch_size or self._is_above_limit(everyone):
            return False
        lengths = [one.length for one in [*chosen, request]]
        padding = max(lengths) * len(lengths) - sum(lengths)
        return padding <= max(LITTLE_PADDING, sum(lengths)) and not (chosen and request.is_suspect)

    def _read(self):
        """Read a chunk of the prompts. After the last one, their texts get the first token and a row."""
        reading = self._reading
        try:
            logits = self._forward(*reading.next_chunk(self.prefill_tokens), reading.cache)
            if reading.is_finished:
                self._reading = None
                self._add_tokens(reading.requests, logits)
                self._put(reading)
        except Exception as error:
            self._reading = None
            self._put_back(reading.active(), error)

    def _put(self, reading: "Reading"):
        kept = [row for row, request in enumerate(reading.requests) if not request.is_done]
        if not kept:
            return
        if len(kept) < len(reading.requests):
            reading.cache.batch_select_indices(torch.tensor(kept, device=self.model.device))
        new = [reading.requests[row] for row in kept]
        ended = [row for row, request in enumerate(self._rows) if request.is_done]
        if len(ended) > len(new) and self._is_above_limit([*self._running(), *new], len(self._rows)):
            self._compact()
            ended = []
        rows = ended[: len(new)]
        rows += range(len(self._rows), len(self._rows) + len(new) - len(rows))
        put_texts(self._cache, reading.cache, rows)
        for row, request in zip(rows, new, strict=True):
            self._rows[row : row + 1] = [request]
            request.is_suspect = False
        self._align()

    def _write(self):
        """One token of all running texts."""
        running = self._running()
        try:
            ids = torch.cat([request.ids[:, -1:] for request in self._rows])  # (B, 1)
            if self._needs_mask:
                self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
            logits = self._forward(ids, self._mask, self._cache)
        except Exception as error:
            self._empty()
            self._put_back(running, error)
        else:
            self._add_tokens(self._rows, logits)
            self._remove_ended()

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache) -> torch.Tensor:
        """The logits of the next tokens in float32, `(B, V)`, a copy."""
        outputs = self.model(ids, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=1)
        return outputs.logits[:, -1].to(torch.float32, copy=True)

    def _add_tokens(self, requests: list[Request], logits: torch.Tensor):
        likeliest = logits.argmax(-1).tolist()
        for row, request in enumerate(requests):
            if not request.is_done:
                try:
                    request.add(request.choose(logits[row : row + 1], likeliest[row]))
                except Exception as error:
                    request.end("error", error)

    def _put_back(self, requests: list[Request], error: Exception):
        """A pass has failed. One text alone has ended with the error; of several, each begins again by itself.

        Which of them is at fault is not known. A text that begins again reads what it has written, and goes on with
        the same random numbers.
        """
        logger.warning("A pass over %d texts has failed: %s", len(requests), error)
        if len(requests) == 1:
            requests[0].end("error", error)
            return
        for request in requests:
            request.is_suspect = True
        with self._lock:
            self._waiting.extendleft(reversed(requests))


class Reading:
    """Prompts that are read together, left-padded, and the cache that they fill."""

    def __init__(self, requests: list[Request]):
        self.requests, self.cache, self.done = requests, DynamicCache(), 0
        longest = max(request.length for request in requests)
        self.ids = left_padded([request.ids[0] for request in requests], longest)
        self.mask = left_padded([request.mask() for request in requests], longest)

    @property
    def is_finished(self) -> bool:
        """Whether all tokens have been read."""
        return self.done == self.ids.shape[1]

    def active(self) -> list[Request]:
        """The texts that have not ended."""
        return [request for request in self.requests if not request.is_done]

    def next_chunk(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens, at most `most` in all rows together but one in each, and the mask up to them."""
        start = self.done
        self.done = min(self.ids.shape[1], start + max(1, most // len(self.requests)))
        return self.ids[:, start : self.done], self.mask[:, : self.done]


def left_padded(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """The last `length` entries of the rows `(L,)` with zeros before shorter ones, `(B, length)`."""
    padded = rows[0].new_zeros(len(rows), length)
    for place, row in zip(padded, rows, strict=True):
        place[max(0, length - len(row)) :] = row[-length:]
    return padded


def check_operators(decoder):
    """Check that the states of a `TnnModel` can be put into rows.

    Raises:
        ValueError: it is bidirectional, or an operator of the user's own cannot be served.
    """
    for layer in decoder.layers:
        operator = getattr(layer.mixer, "tno", None)
        if operator is None:
            continue
        if not can_be_put(operator.recurrence()) or not operator.shift_invariant:
            raise ValueError(
                f"`model` must have shift-invariant operators with rows that `states.put` can move, got {operator}"
            )
