"""Text that a causal model writes while several readers look on.

Each text has its own cache, thread, random numbers and flag to stop, so that none changes another. transformers draws
tokens from the generator of the process, which all texts share. Here each text has its own: a token is the argmax of
log p + g with Gumbel noise g, which is a draw with probabilities p.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tnn_scripts.common.pieces import PieceQueue
from tnn_scripts.common.sampling import TEMPERATURE, TOP_P
from tnn_scripts.common.terminal import check_text

# A text is cut to so many characters for each token that may be read, before the tokenizer sees it.
CHARACTERS_PER_TOKEN = 32

# The name of a thread that writes a text begins with it.
THREAD = "tnn-text"


@dataclass(frozen=True)
class Settings:
    """How a text goes on."""

    max_new_tokens: int = 100
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    seed: int = 0

    def __post_init__(self):
        for name, least in {"max_new_tokens": 1, "seed": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value < 2**63:
                raise ValueError(f"{name} must be a whole number from {least} up, got {value}.")
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}.")
        if not isinstance(self.top_p, (int, float)) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")

    def processors(self, device: torch.device) -> LogitsProcessorList:
        """What turns the scores of the next token into those whose argmax is written."""
        if not self.temperature:
            return LogitsProcessorList()
        warpers = [TemperatureLogitsWarper(float(self.temperature)), TopPLogitsWarper(float(self.top_p))]
        return LogitsProcessorList([*warpers, Draw(self.seed, device)])


@dataclass(frozen=True)
class Progress:
    """How far a text is.

    Args:
        text: what was written so far.
        read: tokens of the prompt that were read.
        is_cut: whether the prompt has more.
        new_tokens: tokens that were written.
        reading_seconds: until the first new token.
        writing_seconds: from the first new token to the last.
        end: why it ended; empty until it has.
    """

    text: str
    read: int
    is_cut: bool
    new_tokens: int
    reading_seconds: float
    writing_seconds: float
    end: str = ""

    def __str__(self) -> str:
        part = "the last " if self.is_cut else ""
        line = f"Read {part}{_count(self.read)} in {self.reading_seconds:.2f} s, wrote {_count(self.new_tokens)}"
        if self.new_tokens > 1:
            line += f" at {(self.new_tokens - 1) / max(self.writing_seconds, 1e-9):,.0f} tokens per second"
        cut = " The text is longer than this page reads: its beginning was left out." if self.is_cut else ""
        return f"{line}.{f' {self.end}' if self.end else ''}{cut}"


def _count(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


class Draw(LogitsProcessor):
    """Adds Gumbel noise to scores: the argmax is a draw from their softmax."""

    def __init__(self, seed: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        exponential = torch.empty_like(scores).exponential_(generator=self.generator)  # (1, V), above 0
        return scores - exponential.log()


class Watch(StoppingCriteria):
    """Counts the tokens of a text, and ends it when `stop` is set."""

    def __init__(self, stop: Event):
        self.stop, self.new_tokens = stop, 0
        self.start = self.first = self.latest = time.perf_counter()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.BoolTensor:
        self.latest = time.perf_counter()
        if not self.new_tokens:
            self.first = self.latest
        self.new_tokens += 1
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)


class Writer:
    """A causal model and its tokenizer, for texts of at most so many tokens.

    Args:
        max_input_tokens: a longer prompt is read from its end.
        max_new_tokens: the most that one may ask for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_input_tokens: int = 8192,
        max_new_tokens: int = 1000,
    ):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_input_tokens, self.max_new_tokens = max_input_tokens, max_new_tokens

    def write(self, prompt: str, settings: Settings, stop: Event) -> Iterator[Progress]:
        """What follows `prompt`, once for each token, and once more with why it ended.

        The thread that generates has ended when the iterator has, and when it is closed before.

        Raises:
            ValueError: the prompt is empty, or more is asked for than the page gives.
        """
        if settings.max_new_tokens > self.max_new_tokens:
            raise ValueError(f"max_new_tokens must be at most {self.max_new_tokens:,}, got {settings.max_new_tokens}.")
        ids, is_cut = self.read(prompt)
        streamer = PieceQueue(self.tokenizer, skip_prompt=True)
        watch, text = Watch(stop), ""

        def progress(end: str = "") -> Progress:
            reading, writing = watch.first - watch.start, watch.latest - watch.first
            return Progress(text, ids.shape[1], is_cut, watch.new_tokens, reading, writing, end)

        with ThreadPoolExecutor(1, thread_name_prefix=THREAD) as pool:
            generation = pool.submit(self._generate, ids, settings, streamer, watch)
            # Without it, a generation that fails would leave the loop below waiting.
            generation.add_done_callback(lambda _: streamer.on_finalized_text("", stream_end=True))
            try:
                for piece in streamer:
                    text += piece
                    yield progress()
                last = generation.result()
                yield progress(self._reason(last, settings, watch))
            finally:
                stop.set()

    def read(self, prompt: str) -> tuple[torch.Tensor, bool]:
        """The tokens of a prompt `(1, L)`, and whether it has more before them.

        Raises:
            ValueError: it has no tokens, or is not UTF-8.
        """
        check_text("The text", prompt)
        kept = prompt[-CHARACTERS_PER_TOKEN * self.max_input_tokens :]
        ids = self.tokenizer(kept, return_tensors="pt", verbose=False)["input_ids"]
        if not ids.shape[1]:
            raise ValueError("The text is empty: write something for the model to continue.")
        return ids[:, -self.max_input_tokens :], len(kept) < len(prompt) or ids.shape[1] > self.max_input_tokens

    def _generate(self, ids: torch.Tensor, settings: Settings, streamer: PieceQueue, watch: Watch) -> int:
        """The last token."""
        ids = ids.to(self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([watch]),
            logits_processor=settings.processors(ids.device),
            max_new_tokens=settings.max_new_tokens,
            # The processors draw; what a saved generation_config.json says of sampling has no part in it.
            do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        return int(output[0, -1])

    def _reason(self, last: int, settings: Settings, watch: Watch) -> str:
        ends = self.model.generation_config.eos_token_id
        if last in (ends if isinstance(ends, list) else [ends]):
            return "The model ended the text."
        return "Stopped." if watch.new_tokens < settings.max_new_tokens else "Reached max_new_tokens."
