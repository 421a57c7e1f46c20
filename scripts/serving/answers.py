"""Answers in the form of OpenAI, whole and as events of a stream."""

import json
import time
import uuid
from collections.abc import Iterable

from tnn_scripts.serving.errors import ApiError
from tnn_scripts.serving.text import Text


class Form:
    """The form of the answers to one request.

    Args:
        model: the name of the model.
        is_chat: whether they are messages of a chat.
    """

    def __init__(self, model: str, is_chat: bool):
        self.model, self.is_chat, self.created = model, is_chat, int(time.time())
        self.id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex

    def whole(self, texts: Iterable[Text], prompts: int) -> dict:
        """The answer with all texts; `prompts` is the number of tokens of their prompts."""
        texts = list(texts)
        return self._head("") | {"choices": [self._choice(text) for text in texts], "usage": usage(texts, prompts)}

    def first(self, text: Text) -> dict | None:
        """The event before a text: the role of a message."""
        if self.is_chat:
            delta = {"role": "assistant", "content": ""}
            return self._event([{"index": text.index, "delta": delta, "finish_reason": None}])
        return None

    def piece(self, text: Text, piece: str) -> dict:
        """An event with a piece of a text, and the reason of its end if it has ended."""
        body = {"delta": {"content": piece} if piece else {}} if self.is_chat else {"text": piece}
        return self._event([{"index": text.index} | body | {"logprobs": None, "finish_reason": text.finish_reason}])

    def last(self, texts: Iterable[Text], prompts: int) -> dict:
        """The event with the number of tokens."""
        return self._event([]) | {"usage": usage(texts, prompts)}

    def _choice(self, text: Text) -> dict:
        content = text.take()
        body = {"message": {"role": "assistant", "content": content}} if self.is_chat else {"text": content}
        return {"index": text.index} | body | {"logprobs": None, "finish_reason": text.finish_reason}

    def _event(self, choices: list[dict]) -> dict:
        return self._head(".chunk") | {"choices": choices}

    def _head(self, kind: str) -> dict:
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def usage(texts: Iterable[Text], prompts: int) -> dict[str, int]:
    """The number of tokens that were read and written."""
    written = sum(len(text.request.tokens) for text in texts)
    return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


def event(data: dict | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def failure(error: Exception) -> ApiError:
    """The error of a text, as its client gets it."""
    return (
        error if isinstance(error, ApiError) else ApiError(500, f"The text was not finished: {type(error).__name__}.")
    )
