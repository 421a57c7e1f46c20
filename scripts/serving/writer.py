"""Texts for the users of a page, one at a time for each. The thread of the engine writes all of them."""

import asyncio
import time
from collections.abc import AsyncIterator

from transformers import PreTrainedTokenizerBase

from modeling_tnn.serving.scheduler import QueueFullError
from tnn_scripts.common.sampling import sampling
from tnn_scripts.common.terminal import check_text
from tnn_scripts.serving.engine import Engine
from tnn_scripts.serving.text import Text

# A prompt is cut to this many characters for each token that may be read, before the tokenizer sees it.
CHARACTERS_PER_TOKEN = 32
# Seconds between two states of a text that are sent to a browser.
INTERVAL = 0.05
WAITING = "Waiting for the model \N{HORIZONTAL ELLIPSIS}"
# The reason of a `Request` -> the sentence for the user.
ENDS = {"stop": " The model ended the text.", "length": " Reached max_new_tokens.", "cancelled": " Stopped."}
CUT = " The text is longer than this page reads: its beginning was left out."


class Writer:
    """The running texts by session, which is a tab of a browser under the name that the server gives it.

    Args:
        max_input_tokens: a longer prompt is read from its end.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, max_input_tokens: int = 8192):
        self.engine, self.tokenizer, self.max_input_tokens = engine, tokenizer, max_input_tokens
        self.texts: dict[str, Text] = {}

    async def write(
        self, session: str, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None
    ) -> AsyncIterator[tuple[str, str]]:
        """Yield the text so far and a line about it, at most every `INTERVAL` seconds and at the end.

        A new text of a session takes the place of its last one, which yields nothing more. Raises the error that
        ended the text.
        """
        yield "", WAITING
        news, options = asyncio.Queue(), {"max_new_tokens": max_new_tokens} | sampling(temperature, top_p)
        try:
            ids, is_cut = await asyncio.to_thread(self.read, prompt)
            text = Text(self.tokenizer, 0, ids, (), news)
            self.stop(session)
            text.request = self.engine.submit(ids, seed, streamer=text, stopping_criteria=[text], **options)
        except (ValueError, QueueFullError) as error:
            yield "", str(error)
            return
        self.texts[session] = text
        written, shown, is_done = "", 0.0, False
        try:
            while not is_done:
                await news.get()
                is_done = text.is_done
                if self.texts.get(session) is not text:
                    return
                if is_done or time.monotonic() - shown > INTERVAL:
                    written, shown = written + text.take(), time.monotonic()
                    yield written, describe(text, is_cut)
        finally:
            self.engine.cancel(text.request)
            if self.texts.get(session) is text:
                del self.texts[session]
        if text.request.error is not None:
            raise text.request.error

    def stop(self, session: str):
        """End the text of a session, if it has one; the page shows what there is."""
        if session in self.texts:
            self.engine.cancel(self.texts[session].request)

    def read(self, prompt: str) -> tuple[list[int], bool]:
        """The tokens of a prompt, and whether it has more before them; ValueError if it has none or is not UTF-8."""
        check_text("The text", prompt)
        kept = prompt[-CHARACTERS_PER_TOKEN * self.max_input_tokens :]
        ids = self.tokenizer(kept, verbose=False)["input_ids"]
        if not ids:
            raise ValueError("The text is empty: write something for the model to continue.")
        return ids[-self.max_input_tokens :], len(kept) < len(prompt) or len(ids) > self.max_input_tokens


def describe(text: Text, is_cut: bool) -> str:
    """The line about a text: tokens, times, and why it has ended."""
    start, *times = text.times
    line = f"Read {'the last ' if is_cut else ''}{count(text.request.prompt_length)}"
    if times:
        line += f" in {times[0] - start:.2f} s"
    line += f", wrote {count(len(times))}"
    if len(times) > 1:
        line += f" at {(len(times) - 1) / max(times[-1] - times[0], 1e-9):,.0f} tokens per second"
    return f"{line}.{ENDS.get(text.request.reason, '')}{CUT if is_cut else ''}"


def count(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"
