"""The bodies of requests, as OpenAI's clients send them. What is not supported is refused by its name.

A long body is read in a short time: lists are bounded, and no more than the first error is looked for.
"""

import re
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError, ValidationError, from_json

from tnn_programs.cli.model_path import did_you_mean
from tnn_programs.serving.http import ApiError

# The most stop strings of a text, and the characters of one; answers to a prompt; prompts of a request; messages of a
# chat, and parts of one; likeliest tokens.
STOPS, STOP_LENGTH, ANSWERS, PROMPTS, MESSAGES, LIKELIEST = 4, 200, 128, 128, 2048, 20
# Values that ask for nothing, in any field that is not supported; and further ones of some fields.
NOTHING = (False, 0, "", [], {})
DEFAULTS = {
    "best_of": [1], "service_tier": ["auto", "default"], "response_format": [{"type": "text"}],
    "tool_choice": ["none", "auto"], "function_call": ["none", "auto"], "parallel_tool_calls": [True],
    "modalities": [["text"]], "verbosity": ["medium"], "reasoning_effort": ["none"],
    # of vLLM and llama.cpp
    "top_k": [-1], "typical_p": [1], "repetition_penalty": [1], "skip_special_tokens": [True],
}  # fmt: skip
# Fields for statistics and caches of other servers.
IGNORED = {
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "cache_control",
}  # fmt: skip


class Given(BaseModel):
    """A part of a body. A field that asks for nothing is one that was left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def leave_out_nothing(cls, given):
        """The fields that ask for something; an error for the first one that is not known."""
        if not isinstance(given, dict):
            raise PydanticCustomError("no_object", "must be a JSON object")
        asked, known = {}, [field.alias or name for name, field in cls.model_fields.items()]
        for name, value in given.items():
            if value is None or name in IGNORED:
                continue
            if name in known:
                asked[name] = value
            elif value not in (*NOTHING, *DEFAULTS.get(name, ())):
                hint = did_you_mean(name[:50], known).replace(".", "; leave it out.")
                raise PydanticCustomError(
                    "extra_forbidden", "`{name}` is not supported{hint}", {"name": name[:50], "hint": hint}
                )
        return asked


Parsed = TypeVar("Parsed", bound=Given)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """The fields of a body; ApiError with what is first wrong in it."""
    try:
        return kind.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].replace("Field required", "must be given").replace(" after validation, not ", ", got ")
        message = re.sub("^(Input|List) should ", "must ", message)
        name = first.get("ctx", {}).get("name")
        place, whole = (".".join(map(str, [*first["loc"], *more])) for more in ((), (name,) if name else ()))
        if place or message.startswith("must"):
            message = f"`{place or 'body'}`{' ' if message.startswith('must') else ': '}{message}"
        raise ApiError(400, message, first["type"], whole or None) from None
    except ValueError as error:
        raise ApiError(400, f"The body must be JSON in UTF-8: {error}", "json_invalid") from None


def as_texts(given) -> list[str | list[int]]:
    """Texts, each a string or token ids, of one that is given alone or of a list."""

    def is_ids(value) -> bool:
        return isinstance(value, list) and set(map(type, value)) <= {int}

    texts = [given] if isinstance(given, str) or (given and is_ids(given)) else given
    if isinstance(texts, list) and not 0 < len(texts) <= PROMPTS:
        raise PydanticCustomError("prompt", f"must be 1 to {PROMPTS} texts, got {len(texts)}")
    if not isinstance(texts, list) or not all(isinstance(text, str) or is_ids(text) for text in texts):
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of texts or of token ids")
    return texts


def as_stops(given) -> list[str]:
    """Stop strings, of one that is given alone or of a list."""
    stops = [given] if isinstance(given, str) and given else given or []
    is_list = isinstance(stops, list) and len(stops) <= STOPS
    if not is_list or not all(isinstance(stop, str) and 0 < len(stop) <= STOP_LENGTH for stop in stops):
        message = f"must be at most {STOPS} strings of 1 to {STOP_LENGTH} characters, got {given!r:.200}"
        raise PydanticCustomError("stop", message)
    return stops


def as_parts(given):
    """The parts of a message that is given as one text."""
    if not isinstance(given, str | list):
        raise PydanticCustomError("content", "must be a text or a list of parts")
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class StreamOptions(Given):
    """Options of a stream."""

    include_usage: bool = False


class Body(Given):
    """Fields of both completions and chats."""

    model_config = ConfigDict(strict=True)
    model: str
    n: int = Field(1, ge=1, le=ANSWERS)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**63 - ANSWERS * PROMPTS)
    stop: Annotated[list[str], PlainValidator(as_stops)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: Annotated[list, PlainValidator(as_texts)]
    most_tokens: int = Field(16, ge=0, alias="max_tokens")
    echo: bool = False
    likeliest: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, ge=0, le=LIKELIEST, alias="logprobs"
    )

    @model_validator(mode="after")
    def needs_something(self):
        """Refuse a text of no tokens, unless that of the prompt is asked for."""
        if self.most_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "greater_than_equal", "`{name}` must be at least 1 without `echo`, got 0", {"name": "max_tokens"}
            )
        return self


class TextPart(Given):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Given):
    """A message of a chat, which may be one that a client got."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), Field(max_length=MESSAGES), BeforeValidator(as_parts)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its parts in one text."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MESSAGES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=LIKELIEST)
    echo: ClassVar[bool] = False

    @property
    def likeliest(self) -> int | None:
        """Number of top tokens reported with each token; None for no log probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens of an answer; None for as many as the server allows."""
        return self.max_completion_tokens or self.max_tokens
