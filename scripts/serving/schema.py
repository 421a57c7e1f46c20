"""The bodies of requests, as OpenAI's clients send them. What is not supported is refused by its name."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, model_validator
from pydantic_core import PydanticCustomError

from tnn_scripts.common.sampling import sampling

# The most stop strings of a text, and the characters of one.
STOPS, STOP_LENGTH = 4, 200

# The most answers to a prompt, and prompts of a request.
ANSWERS, PROMPTS = 128, 128

Temperature = Field(None, ge=0, le=2, allow_inf_nan=False)
TopP = Field(None, gt=0, le=1, allow_inf_nan=False)


def nothing(*values):
    """The type of a field that is not supported: it may have these values alone, which ask for nothing."""

    def check(given):
        if any(given == value and type(given) in (type(value), float) for value in values):
            return given
        allowed = " or ".join(map(json.dumps, values))
        raise PydanticCustomError("literal_error", "must be left out or be {allowed}", {"allowed": allowed})

    return Annotated[Any, AfterValidator(check)]


class Given(BaseModel):
    """A part of a body. A field that is null is one that was left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, given):
        """The fields that have a value.

        Raises:
            ValueError: there is a lone surrogate, in a value or a name, which is no text and which no answer could
                name.
        """
        if not isinstance(given, dict):
            return given
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError("no_text", "The body must be text in UTF-8, got a lone surrogate.") from error
        except RecursionError as error:
            raise PydanticCustomError("too_deep", "The body must have fewer levels.") from error
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Given):
    """What a stream has besides the text."""

    include_usage: bool = False
    include_obfuscation: nothing(False) = False
    continuous_usage_stats: nothing(False) = False


class Body(Given):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True)
    model: str
    n: int | None = Field(1, ge=1, le=ANSWERS)
    temperature: float | None = Temperature
    top_p: float | None = TopP
    seed: int | None = Field(None, ge=0, lt=2**63 - ANSWERS * PROMPTS)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # For statistics and caches of OpenAI; not used.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict | None = None
    # What is not supported is allowed if it asks for nothing.
    frequency_penalty: nothing(0) = None
    presence_penalty: nothing(0) = None
    logit_bias: nothing({}, []) = None
    logprobs: nothing(False) = None
    top_logprobs: nothing(0) = None
    best_of: nothing(1) = None
    echo: nothing(False) = None
    suffix: nothing("") = None
    store: nothing(False) = None
    service_tier: nothing("auto", "default") = None
    response_format: nothing({"type": "text"}) = None
    # The same of vLLM and llama.cpp.
    top_k: nothing(0, -1) = None
    min_p: nothing(0) = None
    typical_p: nothing(1) = None
    repetition_penalty: nothing(1) = None
    min_tokens: nothing(0) = None
    ignore_eos: nothing(False) = None
    skip_special_tokens: nothing(True) = None

    def stops(self) -> list[str]:
        """The stop strings.

        Raises:
            ValueError: they are too many, too long or empty.
        """
        stops = [self.stop] if self.stop and isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS or not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
            raise ValueError(
                f"`stop` must be at most {STOPS} strings of 1 to {STOP_LENGTH} characters, got {stops!r:.200}"
            )
        return stops

    def sampling(self) -> dict:
        """The options of `generate`. A `generation_config.json` has no part in them."""
        return sampling(self.temperature, self.top_p)


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            ValueError: there is none, or there are too many.
        """
        single = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        prompts = [self.prompt] if single else self.prompt
        if not 0 < len(prompts) <= PROMPTS:
            raise ValueError(f"`prompt` must be 1 to {PROMPTS} prompts, got {len(prompts)}")
        return prompts

    def most_tokens(self) -> int | None:
        """The most new tokens of an answer; None for as many as the server allows."""
        return 16 if self.max_tokens is None else self.max_tokens


class LoadBody(Given):
    """The body of `/load_model`."""

    model_config = ConfigDict(extra="ignore")
    model: str


class TextPart(Given):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Given):
    """A message of a chat, which may be one that a client got."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: nothing("") = None
    annotations: nothing([]) = None
    tool_calls: nothing([]) = None

    def plain(self) -> dict[str, str]:
        """The message with its parts in one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatSettings(Given):
    """The fields of a `GenerationConfig` that `transformers chat` sends."""

    do_sample: bool = True
    temperature: float | None = Temperature
    top_p: float | None = TopP
    max_new_tokens: int | None = Field(None, ge=1)
    transformers_version: str | None = None  # not used


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: nothing([]) = None
    functions: nothing([]) = None
    tool_choice: nothing("none", "auto") = None
    function_call: nothing("none", "auto") = None
    parallel_tool_calls: nothing(False, True) = None
    modalities: nothing(["text"]) = None
    verbosity: nothing("medium") = None
    reasoning_effort: nothing("none") = None
    generation_config: Json[ChatSettings] | None = None

    @model_validator(mode="after")
    def use_generation_config(self):
        """Take the settings of `transformers chat`, which has no others."""
        given = self.generation_config
        if given is not None:
            self.temperature = given.temperature if given.do_sample else 0.0
            self.top_p, self.max_tokens = given.top_p, given.max_new_tokens
        return self

    def most_tokens(self) -> int | None:
        """The most new tokens of an answer; None for as many as the server allows."""
        return self.max_completion_tokens or self.max_tokens
