"""The vectors of texts by an encoder: means over the tokens, as in sentence-transformers."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import torch
from fastapi.concurrency import run_in_threadpool
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from modeling_tnn.inputs import mean_of_real_tokens
from modeling_tnn.serving.scheduler import QueueFullError


class Encoder:
    """Reads texts with a bidirectional `TnnModel`, a batch after the other; at most `max_waiting` requests take turns.

    A batch has at most `most_rows` texts and, if it has several, `most_tokens` tokens, padding included.
    """

    is_alive, num_running, state_bytes = True, 0, 0  # as of an `Engine`, for metrics and /health

    def __init__(self, model: PreTrainedModel, most_rows: int, most_tokens: int, max_waiting: int):
        self.model, self.most_rows, self.most_tokens, self.max_waiting = model, most_rows, most_tokens, max_waiting
        self.num_waiting = 0
        self._turn = asyncio.Lock()  # who waits longest is next

    async def embed(self, texts: list[list[int]], is_gone: Callable[[], Awaitable[bool]]) -> np.ndarray:
        """The vectors of texts of token ids, `(B, d)` in float32; a `QueueFullError` if too many are waiting.

        A client that `is_gone` gets no further batch.
        """
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests are waiting for their turn. Try again later.")
        vectors = np.empty((len(texts), self.model.config.hidden_size), np.float32)
        for rows in self._batches(texts):
            if await is_gone():
                break
            self.num_waiting += 1
            try:
                async with self._turn:
                    vectors[rows] = await run_in_threadpool(self._means, [texts[row] for row in rows])
            finally:
                self.num_waiting -= 1
        return vectors

    def _batches(self, texts: list[list[int]]) -> Iterator[list[int]]:
        """The numbers of the texts in each batch: those of like lengths together."""
        rows: list[int] = []
        for row in sorted(range(len(texts)), key=lambda row: len(texts[row])):
            if rows and (len(rows) == self.most_rows or len(texts[row]) * (len(rows) + 1) > self.most_tokens):
                yield rows
                rows = []
            rows.append(row)
        yield rows

    def _means(self, texts: list[list[int]]) -> np.ndarray:
        rows = [torch.tensor(text, device=self.model.device) for text in texts]
        ids = pad_sequence(rows, batch_first=True)  # (B, L)
        mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True)
        with torch.no_grad():
            hidden = self.model(ids, attention_mask=mask).last_hidden_state
        return mean_of_real_tokens(hidden, mask).float().cpu().numpy()

    def close(self):
        """Nothing runs on."""


def written(vector: np.ndarray, encoding: str) -> list[float] | str:
    """A vector as an answer has it: numbers, or the base64 of its float32 numbers, little end first."""
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
