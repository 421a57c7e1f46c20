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
        prompts: the number of tokens of all prompts.
    """

    def __init__(self, model: str, is_chat: bool, prompts: int):
        self.model, self.is_chat, self.prompts, self.created = model, is_chat, prompts, int(time.time())
        self.id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex

    def whole(self, texts: Iterable[Text]) -> dict:
        """The answer with all texts."""
        choices = []
        for text in texts:
            content = text.take()
            body = {"message": {"role": "assistant", "content": content}} if self.is_chat else {"text": content}
            choices.append(self._choice(text, body))
        return self._head("", choices) | {"usage": self._usage(texts)}

    def first(self, text: Text) -> dict | None:
        """The event before a text: the role of a message."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": text.index, "delta": delta, "finish_reason": None}
        return self._head(".chunk", [choice]) if self.is_chat else None

    def piece(self, text: Text, piece: str) -> dict:
        """An event with a piece of a text, and the reason of its end if it has ended."""
        body = {"delta": {"content": piece} if piece else {}} if self.is_chat else {"text": piece}
        return self._head(".chunk", [self._choice(text, body)])

    def last(self, texts: Iterable[Text]) -> dict:
        """The event with the number of tokens."""
        return self._head(".chunk", []) | {"usage": self._usage(texts)}

    def _choice(self, text: Text, body: dict) -> dict:
        return {"index": text.index} | body | {"logprobs": None, "finish_reason": text.finish_reason}

    def _head(self, kind: str, choices: list[dict]) -> dict:
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self, texts: Iterable[Text]) -> dict[str, int]:
        written = sum(len(text.request.tokens) for text in texts)
        return {"prompt_tokens": self.prompts, "completion_tokens": written, "total_tokens": self.prompts + written}


def event(data: dict | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def failure(text: Text) -> ApiError | None:
    """The error of a text that was not finished, as its client gets it."""
    if text.request.reason == "cancelled" and text.is_late:
        return ApiError(504, "The text was not finished in the time that a request may take.", "timeout")
    if text.request.reason == "cancelled":
        return ApiError(503, "The text was not finished: the server is shutting down.", "shutting_down")
    error = text.request.error
    return error and ApiError(500, f"The text was not finished: {type(error).__name__}.")
