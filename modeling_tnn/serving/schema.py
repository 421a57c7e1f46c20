"""The bodies of requests, as OpenAI's clients send them. What is not supported is refused by its name."""

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tnn_cli.sampling import sampling

from .http import ApiError

# The most stop strings of a text, and the characters of one; answers to a prompt, and prompts of a request.
STOPS, STOP_LENGTH, ANSWERS, PROMPTS = 4, 200, 128, 128
# Values that ask for nothing, in any field that is not supported; and further ones of some fields.
NOTHING = (False, 0, "", [], {})
DEFAULTS = {
    "best_of": [1], "service_tier": ["auto", "default"], "response_format": [{"type": "text"}],
    "tool_choice": ["none", "auto"], "function_call": ["none", "auto"], "parallel_tool_calls": [True],
    "modalities": [["text"]], "verbosity": ["medium"], "reasoning_effort": ["none"],
    # of vLLM and llama.cpp
    "top_k": [-1], "typical_p": [1], "repetition_penalty": [1], "skip_special_tokens": [True],
}  # fmt: skip
# Fields for statistics and caches of OpenAI.
IGNORED = {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"}


class Given(BaseModel):
    """A part of a body. A field that asks for nothing is one that was left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def leave_out_nothing(cls, given):
        """The fields that are known or ask for something; a ValueError for lone surrogates, which are no text."""
        if not isinstance(given, dict):
            return given
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError("no_text", "The body must be text in UTF-8, got a lone surrogate.") from error
        except RecursionError as error:
            raise PydanticCustomError("too_deep", "The body must have fewer levels.") from error
        asked = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
        unused = {name for name, value in asked.items() if value in (*NOTHING, *DEFAULTS.get(name, ()))}
        return {name: value for name, value in asked.items() if name in cls.model_fields or name not in unused}


class StreamOptions(Given):
    """What a stream has besides the text."""

    include_usage: bool = False


class Body(Given):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True)
    model: str
    n: int = Field(1, ge=1, le=ANSWERS)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**63 - ANSWERS * PROMPTS)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def stops(self) -> list[str]:
        """The stop strings; an ApiError if they are too many, too long or empty."""
        stops = [self.stop] if self.stop and isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS or not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
            message = f"`stop` must be at most {STOPS} strings of 1 to {STOP_LENGTH} characters, got {stops!r:.200}"
            raise ApiError(400, message, "stop", "stop")
        return stops

    def sampling(self) -> dict:
        """The options of `generate`. A `generation_config.json` has no part in them."""
        return sampling(self.temperature, self.top_p)


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=1)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids; an ApiError if there is none, or if there are too many."""
        single = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        prompts = [self.prompt] if single else self.prompt
        if not 0 < len(prompts) <= PROMPTS:
            raise ApiError(400, f"`prompt` must be 1 to {PROMPTS} prompts, got {len(prompts)}", "prompt", "prompt")
        return prompts

    def most_tokens(self) -> int:
        """The most new tokens of an answer."""
        return self.max_tokens


class TextPart(Given):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Given):
    """A message of a chat, which may be one that a client got."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its parts in one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def most_tokens(self) -> int | None:
        """The most new tokens of an answer; None for as many as the server allows."""
        return self.max_completion_tokens or self.max_tokens
