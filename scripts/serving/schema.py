"""The bodies of requests, as OpenAI's clients send them. What is not supported is refused by its name."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, Json, model_validator

# The most stop strings of a text, and the characters of one.
STOPS, STOP_LENGTH = 4, 200

# The most answers to a prompt, and prompts of a request.
ANSWERS, PROMPTS = 128, 128

StopString = Field(min_length=1, max_length=STOP_LENGTH)


class StreamOptions(BaseModel):
    """What a stream has besides the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Body(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    n: int | None = Field(1, ge=1, le=ANSWERS)
    temperature: float | None = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**63 - ANSWERS * PROMPTS)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # for statistics of OpenAI; not used
    # What has no effect is allowed if it asks for nothing.
    frequency_penalty: Literal[0, 0.0] | None = None
    presence_penalty: Literal[0, 0.0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    def stops(self) -> list[str]:
        """The stop strings.

        Raises:
            ValueError: they are too many, too long or empty.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS or not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
            raise ValueError(
                f"`stop` must be at most {STOPS} strings of 1 to {STOP_LENGTH} characters, got {stops!r:.200}"
            )
        return stops

    def sampling(self) -> dict:
        """The options of `generate`. A `generation_config.json` has no part in them."""
        if not (temperature := 1.0 if self.temperature is None else self.temperature):
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        top_p = 1.0 if self.top_p is None else self.top_p
        return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

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


class LoadBody(BaseModel):
    """The body of `/load_model`."""

    model: str


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its parts in one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatSettings(BaseModel):
    """The fields of a `GenerationConfig` that `transformers chat` sends."""

    model_config = ConfigDict(extra="forbid")
    do_sample: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    transformers_version: str | None = None  # not used


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    model_config = ConfigDict(validate_assignment=True)
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    tools: None = None
    generation_config: Json[ChatSettings] | None = None

    @model_validator(mode="after")
    def use_generation_config(self):
        """Take the settings of `transformers chat`, which has no others."""
        given, self.__dict__["generation_config"] = self.generation_config, None
        if given is not None:
            self.temperature = given.temperature if given.do_sample else 0.0
            self.top_p, self.max_tokens = given.top_p, given.max_new_tokens
        return self

    def most_tokens(self) -> int | None:
        """The most new tokens of an answer; None for as many as the server allows."""
        return self.max_completion_tokens or self.max_tokens
