"""Many texts at once: one forward pass for each token of all of them, while texts come and go.

    waiting  ->  reading (prompts, left-padded, a chunk in each step)  ->  writing (rows of one cache)  ->  done

The tokens of a text are those of `generate`, whatever else runs: transformers prepares its processors and criteria,
which are applied row by row, with the random numbers of that text.

A row that has ended runs on until another text takes it, or a quarter of all rows has ended: to remove it would copy
the states of the others.

Clients share the places. Next is a text of the client that has the fewest, and where none is free a text of the one
with the most goes back to wait, and is read again later.
"""

import copy
import logging
import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from ..compile.token_loop import PLACE_BLOCK, check_loop, uses_graphs
from ..configuration_tnn import has_attention
from ..tools.comparing import memory_per_sequence
from .launches import RowLoop, move_rows
from .request import Request, prepare
from .rows import bytes_of_text, drop_padding, insert_rows
from .sampling import Draw
from .states import has_movable_rows

logger = logging.getLogger(__name__)

LITTLE_PADDING = 256  # Prompts are read together if padding is at most half of them, or this number of tokens.
ENDED_SHARE = 1 / 4  # Rows of ended texts are removed when they are this share of all.
READING_STEPS = 4  # The most steps in which several prompts are read: those of other clients wait for them.
MOST_LOGITS = 2**25  # In a step where the logits of all tokens of prompts are asked for.
CLIENTS = 4  # Texts of more clients than these cannot wait if each has as many as one may have.


class QueueFullError(RuntimeError):
    """So many texts are waiting that no other one is taken."""


class BatchScheduler:
    """Writes many texts at once with a `TnnForCausalLM` in evaluation mode.

    `submit` and `cancel` may be called from any thread, `step` and what calls it from one at a time.

    Args:
        max_batch_size: the most texts that are read or written at the same time.
        memory_limit: the most bytes of their decoding states; None for no limit. A pass over prompts needs more.
        prefill_tokens: the most tokens of prompts in a step, padding included. With fewer, others wait less for them.
        max_waiting: the most texts of a client that wait for a place when none is free; None for no limit.
        tokens_per_launch: the most tokens of each text in a step: 1, 2, 4, 8 or 16. On CUDA they are one graph, of
            `max_batch_size` rows. It is 1 while a text is written that asks for log probabilities, or for a processor
            other than temperature, `top_k` and `top_p`.

    Attributes:
        state_bytes: the bytes of the decoding states that were held after the latest step.

    Raises:
        ValueError: the model is bidirectional, has an operator whose states cannot be put into rows, or a sliding
            window with several tokens in a step.

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
        tokens_per_launch: int = 1,
    ):
        given = {"max_batch_size": max_batch_size, "prefill_tokens": prefill_tokens}
        given |= {"memory_limit": memory_limit or 1, "max_waiting": max_waiting or 1}
        for name, value in given.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number from 1 up, got {value!r}")
        self.model, self._decoder = model, model.get_decoder()
        for operator in (layer.mixer.tno for layer in self._decoder.layers if hasattr(layer.mixer, "tno")):
            if not has_movable_rows(operator.recurrence()) or not operator.shift_invariant:
                raise ValueError(f"`model` must have shift-invariant operators known to `states.put`, got {operator}")
        self.max_batch_size, self.memory_limit = max_batch_size, memory_limit
        self.prefill_tokens, self.max_waiting = prefill_tokens, max_waiting
        if tokens_per_launch != 1:
            if any(next(layer.parameters()).is_meta for layer in self._decoder.layers):
                raise ValueError("`model` must not be offloaded for several tokens at once")
            check_loop(model, StaticCache(model.config, max_cache_len=1), (), GenerationConfig(), tokens_per_launch)
        self.tokens_per_launch = tokens_per_launch
        self._fixed_rows = max_batch_size if tokens_per_launch > 1 and uses_graphs(model.device) else 0
        self._needs_mask = has_attention(model.config) or model.config.position_embedding == "sinusoidal"
        self._lock = threading.RLock()  # `end` of a streamer may submit the next text
        self._waiting: deque[Request] = deque()
        self._reading, self._writing = Batch(model), Batch(model)
        self.state_bytes = 0

    def submit(
        self, input_ids: torch.Tensor, seed: int | None = None, *, client: Hashable = None,
        logprobs: int | None = None, prompt_logprobs: bool = False, **options,
    ) -> Request:  # fmt: skip
        """Queue a text.

        Args:
            input_ids: the prompt, `(1, L)` or `(L,)`.
            seed: that of the random numbers of this text. `torch.manual_seed(seed)` before `generate` gives the same.
            client: who asks; clients have equal shares of the places.
            logprobs: store the log probability of each token, and of this number of likeliest ones.
            prompt_logprobs: note it of the tokens of the prompt too.
            options: those of `generate` for greedy search and sampling, such as `max_new_tokens`, `do_sample`,
                `stopping_criteria` and `streamer`. `stop_strings` are a `StopStringCriteria` among the criteria.

        Raises:
            QueueFullError: `max_waiting` texts are waiting.
            TypeError, ValueError: those of `generate`; a beam search or the like; the state of the text alone is above
                `memory_limit`.
        """
        prompt = input_ids[None] if isinstance(input_ids, torch.Tensor) and input_ids.dim() == 1 else input_ids
        request = prepare(self.model, prompt, seed, **options)
        request.client, request.likeliest = client, 0 if logprobs is None and prompt_logprobs else logprobs
        request.prompt_logprobs = [] if prompt_logprobs else None
        if self._is_above_limit([request]):
            needed = bytes_of_text(self._decoder, request.max_length)
            raise ValueError(
                f"`memory_limit` must be at least {needed:,} bytes for a text of {request.max_length:,} tokens, got "
                f"{self.memory_limit:,}"
            )
        with self._lock:
            self._check_queue(client)
            self._waiting.append(request)
        return request

    def _check_queue(self, client: Hashable):
        if self.max_waiting is None:
            return
        free = max(0, self.max_batch_size - self.num_running)
        own = sum(request.client == client for request in self._waiting)
        if own >= self.max_waiting + free or len(self._waiting) >= CLIENTS * self.max_waiting + free:
            raise QueueFullError(f"{own} texts are waiting for their turn. Try again later.")

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
        """The new tokens after each of the prompts, lists of integers. Errors are those of `submit` and `stream`."""
        prompts = list(prompts)
        pairs = zip(prompts, [None] * len(prompts) if seeds is None else seeds, strict=True)
        requests = [self.submit(prompt, seed, **options) for prompt, seed in pairs]
        return [list(self.stream(request)) for request in requests]

    def step(self) -> bool:
        """Read a chunk of prompts, write the next tokens of each running text; whether there is more to do."""
        with torch.no_grad():
            with self._lock:
                for request in [*self._waiting, *self._active()]:
                    if request.is_cancelled:
                        request.end("cancelled")
                self._waiting = deque(request for request in self._waiting if not request.is_done)
            self._begin_reading()
            if self._writing.running():
                self._advance(self._writing)
            self._writing.remove_ended(2 if self._fixed_rows else ENDED_SHARE)
            if self._reading.requests:
                self._advance(self._reading)
        batches = (self._reading, self._writing)
        self.state_bytes = sum(len(batch.requests) * memory_per_sequence(batch.cache) for batch in batches)
        return self.has_work

    def run(self):
        """Take steps until all texts have ended."""
        while self.step():
            pass

    def end_all(self, reason: str = "cancelled", error: Exception | None = None):
        """End all texts, those that wait too."""
        with self._lock:
            for request in [*self._waiting, *self._active()]:
                request.end(reason, error)
            self._waiting.clear()
        self._reading, self._writing = Batch(self.model), Batch(self.model)

    @property
    def has_work(self) -> bool:
        """Whether a text has not ended."""
        return bool(self._waiting or self._active())

    @property
    def num_waiting(self) -> int:
        """The number of texts that wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of texts that are read or written."""
        return len(self._active())

    def _active(self) -> list[Request]:
        return self._writing.running() + self._reading.running()

    def _is_above_limit(self, requests: list[Request], rows: int = 0) -> bool:
        """Whether the states of these texts, in this number of rows or more, may exceed the limit."""
        if self.memory_limit is None:
            return False
        longest = places_for(requests, self.tokens_per_launch)
        return max(rows, len(requests), self._fixed_rows) * bytes_of_text(self._decoder, longest) > self.memory_limit

    def _begin_reading(self):
        """Let as many texts as have room read their prompts; next is the oldest of the client with the fewest."""
        if self._reading.running():
            return
        chosen: list[Request] = []
        with self._lock:
            while self._waiting:
                held = Counter(request.client for request in self._writing.running() + chosen)
                following = min(self._waiting, key=lambda request: held[request.client])
                if self._has_room([*chosen, following]):
                    self._waiting.remove(following)
                    chosen.append(following)
                elif chosen or max(held.values(), default=0) <= held[following.client] + 1:
                    break
                else:
                    self._waiting.appendleft(self._writing.send_back(held.most_common(1)[0][0]))
            self._reading = Batch(self.model, chosen)

    def _has_room(self, chosen: list[Request]) -> bool:
        """Whether these texts can be read together, and written with those that are."""
        everyone, lengths = self._writing.running() + chosen, [request.length for request in chosen]
        padding = max(lengths) * len(lengths) - sum(lengths)
        may_meet = len(chosen) == 1 or not any(request.is_suspect for request in chosen)
        has_room = len(everyone) <= self.max_batch_size and not self._is_above_limit(everyone)
        is_short = len(chosen) == 1 or max(lengths) * len(lengths) <= READING_STEPS * self.prefill_tokens
        return may_meet and has_room and is_short and padding <= max(LITTLE_PADDING, sum(lengths))

    def _advance(self, batch: "Batch"):
        """Take one pass over a batch. Texts whose tokens have been read then get the next one."""
        try:
            simple = all(one.sampling and one.likeliest is None for one in batch.running())
            if simple and batch is self._writing and self.tokens_per_launch > 1:
                for tokens in batch.launch(self.tokens_per_launch, self._needs_mask, self._fixed_rows):
                    add_tokens(batch.requests, tokens)
                return
            logits = batch.read(self.prefill_tokens, self._needs_mask or batch is self._reading)
            if logits is not None:
                draw = Draw(batch.requests, 1, logits.shape[1], logits.device)
                add_tokens(batch.requests, draw.choose(logits, 0).tolist(), logits)
                if batch is self._reading:
                    self._put_into_rows()
        except Exception as error:
            self._begin_again(batch.running(), error)
            batch.clear()

    def _put_into_rows(self):
        """Put the texts that have read their prompts among those that are written."""
        self._reading.remove_ended()
        if new := self._reading.requests:
            if self._is_above_limit(self._writing.running() + new, len(self._writing.requests)):
                self._writing.remove_ended()
            self._writing.put(self._reading)

    def _begin_again(self, requests: list[Request], error: Exception):
        """End a text whose pass has failed. Of several any may be at fault: each reads its tokens again by itself."""
        logger.warning("A pass over %d texts has failed: %s", len(requests), error)
        if len(requests) == 1:
            requests[0].end("error", error)
            return
        for request in requests:
            request.is_suspect = True
        with self._lock:
            self._waiting.extendleft(reversed(requests))


class Batch:
    """Texts in the rows of one cache, left-padded. Ended ones stay until their rows are taken or removed."""

    def __init__(self, model, requests: Iterable[Request] = ()):
        self.model, self.requests = model, [*requests]
        self.cache: Cache = DynamicCache()  # a static one after a launch
        self._longest = max((request.length for request in self.requests), default=0)  # of the prompts that are read

    def clear(self):
        self.requests, self.cache = [], DynamicCache()

    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.is_done]

    def read(self, most: int, masked: bool) -> torch.Tensor | None:
        """Read the next tokens of all texts, at most `most` in all but one of each, with their mask if `masked`.

        Return a copy of the logits after the last token of each, `(B, V)` in float32, or None if it was not read.
        """
        past = int(self.movable().get_seq_length())
        unread = max(1, self._longest - past)  # of a text that is written: its newest token
        noted = [row for row, one in enumerate(self.requests) if one.prompt_logprobs is not None]
        noted = noted if past < self._longest else []
        most = min(most, MOST_LOGITS // self.model.config.vocab_size) if noted else most
        count = max(1, min(unread, most // len(self.requests)))
        ids = left_padded([one.ids[0, -unread:] for one in self.requests], unread)[:, :count]
        mask = left_padded([one.mask for one in self.requests], past + unread)[:, : past + count] if masked else None
        keep = count if noted else 1
        outputs = self.model(ids, attention_mask=mask, cache=self.cache, use_cache=True, logits_to_keep=keep)
        for row in noted:
            self.requests[row].note_prompt(outputs.logits[row], past - self._longest + self.requests[row].length)
        return outputs.logits[:, -1].to(torch.float32, copy=True) if count == unread else None

    def movable(self) -> Cache:
        """The cache, whose rows can be moved: a dynamic one."""
        if self.cache.is_compileable:
            self.cache = move_rows(self.model, self.cache, DynamicCache(config=self.model.config))
        return self.cache

    def launch(self, most: int, masked: bool, rows: int) -> list[list[int]]:
        """The next tokens of all texts, at most `most` of each, in at least this number of rows."""
        past = int(self.cache.get_seq_length())
        if not self.cache.is_compileable or past + most > self.cache.layers[0].max_cache_len:
            self._drop_padding()
            added = max(0, rows - len(self.requests))
            chosen = torch.tensor([*range(len(self.requests))] + [0] * added, device=self.model.device)
            self.movable().batch_select_indices(chosen)
            self.requests += [ended(self.requests[0])] * added
            static = StaticCache(self.model.config, places_for(self.running(), most))
            self.cache, past = move_rows(self.model, self.cache, static), int(self.cache.get_seq_length())
        mask = left_padded([one.mask for one in self.requests], past + 1) if masked else None
        return RowLoop(self.model, self.cache, self.requests, mask, most).tokens

    def put(self, new: "Batch"):
        """Take the texts of another batch into the rows of those that have ended, then into new rows."""
        rows = [row for row, request in enumerate(self.requests) if request.is_done][: len(new.requests)]
        rows += range(len(self.requests), len(self.requests) + len(new.requests) - len(rows))
        insert_rows(self.movable(), new.cache, rows)
        for row, request in zip(rows, new.requests, strict=True):
            self.requests[row : row + 1] = [request]
            request.is_suspect = False
        new.clear()
        self._drop_padding()

    def send_back(self, client: Hashable) -> Request:
        """Take out the shortest text of a client; its row runs on as that of one that has ended."""
        request = min((one for one in self.running() if one.client == client), key=lambda one: one.length)
        self.requests[self.requests.index(request)] = ended(request)
        return request

    def remove_ended(self, share: float = 0):
        """Remove the rows of texts that have ended, if they are at least this share of all."""
        rows = [row for row, request in enumerate(self.requests) if not request.is_done]
        if not rows:
            self.clear()
        elif len(self.requests) - len(rows) >= max(1, share * len(self.requests)):
            self.movable().batch_select_indices(torch.tensor(rows, device=self.requests[0].ids.device))
            self.requests = self.running()
            self._drop_padding()

    def _drop_padding(self):
        """Drop the padding that all texts have."""
        longest = max(request.length for request in self.running()) - 1  # the newest token has not been read
        drop_padding(self.movable(), int(self.cache.get_seq_length()) - longest)


def left_padded(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """The last `length` entries of the rows `(L,)` with zeros before shorter ones, `(B, length)`."""
    return torch.stack([row if len(row) == length else pad(row, (length - len(row), 0)) for row in rows])


def ended(request: Request) -> Request:
    """A copy of a text that has ended."""
    one = copy.copy(request)
    one.reason, one.tokens = "cancelled", [*request.tokens]
    return one


def places_for(requests: list[Request], most: int) -> int:
    """The number of tokens of a row in which these texts are written, at most `most` in a launch."""
    longest = max(request.max_length for request in requests)  # all rows have its length
    return longest if most == 1 else -(-(longest + most) // PLACE_BLOCK) * PLACE_BLOCK  # they run on behind their ends


def add_tokens(requests: list[Request], tokens: list[int], logits: torch.Tensor | None = None):
    """Add the next token of each text. An error of its processors, criteria or streamer ends the text alone."""
    for row, request in enumerate(requests):
        if not request.is_done:
            try:
                request.add(request.choose(None if logits is None else logits[row : row + 1], tokens[row]))
            except Exception as error:
                request.end("error", error)
