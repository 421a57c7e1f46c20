"""The routes of OpenAI's API over one causal TNN.

    /v1/models  /v1/completions  /v1/chat/completions  /health  /metrics

A client that goes away ends its texts. The limits are those of `Limits`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST
from transformers import PreTrainedTokenizerBase

from modeling_tnn.serving.scheduler import QueueFullError
from tnn_scripts.serving.answers import Form, event, failure
from tnn_scripts.serving.engine import Engine
from tnn_scripts.serving.errors import ApiError
from tnn_scripts.serving.metrics import CountResponses, Metrics
from tnn_scripts.serving.responses import ApiKey, BodyLimit, handle
from tnn_scripts.serving.schema import Body, ChatBody, CompletionBody, LoadBody
from tnn_scripts.serving.text import Text

# The status of a response that nobody reads, as nginx writes it.
GONE = 499


@dataclass(frozen=True)
class Limits:
    """What a request may ask for: tokens of a prompt and of a text, bytes of a body, and seconds.

    Attributes:
        read_seconds: for the body to come.
        max_seconds: from then to the end of all texts.
    """

    max_prompt_tokens: int = 8192
    max_new_tokens: int = 1000
    max_body_bytes: int = 2**20
    read_seconds: float = 30
    max_seconds: float = 600


class Service:
    """One model, its tokenizer, and the thread that writes."""

    def __init__(self, name: str, engine: Engine, tokenizer: PreTrainedTokenizerBase, limits: Limits):
        self.name, self.engine, self.tokenizer, self.limits = name, engine, tokenizer, limits
        self.metrics = Metrics(engine.scheduler)
        self.card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "modeling-tnn"}

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ApiError: there are none or too many, or an id is not of the model.
        """
        vocabulary = self.engine.scheduler.model.config.vocab_size
        ids = self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "`prompt` must have at least one token, got none", "empty_prompt", "prompt")
        if len(ids) > self.limits.max_prompt_tokens:
            message = f"`prompt` must have at most {self.limits.max_prompt_tokens:,} tokens, got {len(ids):,}"
            raise ApiError(400, message, "context_length_exceeded", "prompt")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ApiError(400, f"`prompt` must have ids from 0 to {vocabulary - 1}", "invalid_token", "prompt")
        return ids

    def chat_tokens(self, body: ChatBody) -> list[int]:
        """The tokens of a conversation, by the template of the tokenizer.

        Raises:
            ApiError: there is no template, or it refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise ApiError(400, f"The tokenizer of {self.name} has no chat template.", "no_chat_template")
        messages = [message.plain() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"The chat template: {error}", "chat_template", "messages") from error
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.tokens(ids)

    def check_engine(self):
        """Refuse texts that nobody would write.

        Raises:
            ApiError: the thread that writes has ended.
        """
        if not self.engine.is_alive:
            raise ApiError(503, "The thread that writes has ended; the log of the server has the reason.")

    def submit(self, body: Body, prompts: list[list[int]], texts: list[Text]):
        """Queue the texts, as many for each prompt.

        Raises:
            ApiError: more is asked for than the server gives, the queue is full, or nothing is written any more. No
                text is left in it.
        """
        self.check_engine()
        most = body.most_tokens() or self.limits.max_new_tokens
        if most > self.limits.max_new_tokens:
            message = f"`max_tokens` must be at most {self.limits.max_new_tokens:,}, got {most:,}"
            raise ApiError(400, message, "max_tokens", "max_tokens")
        options = {"max_new_tokens": most} | body.sampling()
        try:
            for text in texts:
                ids = prompts[text.index * len(prompts) // len(texts)]
                seed = None if body.seed is None else body.seed + text.index
                text.request = self.engine.submit(ids, seed, streamer=text, stopping_criteria=[text], **options)
        except Exception as error:
            self.leave(texts)
            if isinstance(error, QueueFullError):
                raise ApiError(429, str(error), "queue_full") from error
            if isinstance(error, ValueError):
                raise ApiError(400, str(error)) from error
            raise

    def end_late(self, texts: list[Text]):
        """End the texts that have not ended: their time is over."""
        for text in texts:
            text.is_late = True
            self.engine.cancel(text.request)

    def leave(self, texts: list[Text]):
        """End the texts that have not ended, and count all."""
        for text in texts:
            if text.request is not None:
                if not text.is_done:
                    self.engine.cancel(text.request)
                self.metrics.count_text(text)


class EventStream(StreamingResponse):
    """A stream of events that calls `leave` at its end, also if the client went away before the first one."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.leave = leave

    async def __call__(self, scope, receive, send):
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


async def answer(service: Service, request: Request, body: Body, prompts: list[list[int]]) -> Response:
    """The response to a request: all texts at once, or a stream of their pieces.

    Raises:
        ApiError: the texts cannot be written.
    """
    news: asyncio.Queue[Text] = asyncio.Queue()
    try:
        stops = body.stops()
    except ValueError as error:
        raise ApiError(400, str(error), "stop", "stop") from error
    answers = body.n or 1
    texts = [
        Text(service.tokenizer, index, prompts[index // answers], stops, news)
        for index in range(len(prompts) * answers)
    ]
    form, read = Form(service.name, isinstance(body, ChatBody)), sum(map(len, prompts))
    await run_in_threadpool(service.submit, body, prompts, texts)
    timer = asyncio.get_running_loop().call_later(service.limits.max_seconds, service.end_late, texts)

    def leave():
        timer.cancel()
        service.leave(texts)

    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(events(texts, news, form, read if with_usage else None), leave)
    try:
        if not await finished(texts, news, request):
            return Response(status_code=GONE)
    finally:
        leave()
    for error in filter(None, (text.error for text in texts)):
        raise failure(error)
    return JSONResponse(form.whole(texts, read))


async def finished(texts: list[Text], news: asyncio.Queue, request: Request) -> bool:
    """Wait until all texts have ended; whether the client has waited too."""

    async def end():
        while not all(text.is_done for text in texts):
            await news.get()

    async def departure():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(wait()) for wait in (end, departure)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return not tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()


async def events(texts: list[Text], news: asyncio.Queue, form: Form, read: int | None) -> AsyncIterator[str]:
    """The pieces of all texts as they come, with the number of tokens at the end if `read` is that of the prompts."""
    for opening in filter(None, map(form.first, texts)):
        yield event(opening)
    open_texts = set(texts)
    while open_texts:
        text = await news.get()
        if text not in open_texts:
            continue
        if text.is_done:
            open_texts.remove(text)
        if text.is_done and text.error is not None:
            yield event(failure(text.error).content())
        elif (piece := text.take()) or text.is_done:
            yield event(form.piece(text, piece))
    if read is not None:
        yield event(form.last(texts, read))
    yield event("[DONE]")


def build_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application with all routes, for those who have the key if there is one."""
    app = FastAPI(title=f"{service.name}, a Toeplitz neural network", docs_url=None, redoc_url=None)
    handle(app)

    app.add_middleware(BodyLimit, most=service.limits.max_body_bytes, seconds=service.limits.read_seconds)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(CountResponses, metrics=service.metrics)

    def check_model(name: str):
        if name != service.name:
            message = f"The model `{name}` does not exist. There is {service.name}."
            raise ApiError(404, message, "model_not_found", "model")

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        check_model(name)
        return service.card

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request):
        check_model(body.model)
        try:
            given = body.prompts()
        except ValueError as error:
            raise ApiError(400, str(error), "prompt", "prompt") from error
        prompts = [await run_in_threadpool(service.tokens, prompt) for prompt in given]
        return await answer(service, request, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request):
        check_model(body.model)
        prompt = await run_in_threadpool(service.chat_tokens, body)
        return await answer(service, request, body, [prompt])

    @app.post("/load_model")
    async def load_model(body: LoadBody):
        """What `transformers chat` asks for first: the model is loaded."""
        check_model(body.model)
        return StreamingResponse(iter([event({"status": "ready", "cached": True})]), media_type="text/event-stream")

    @app.get("/health")
    async def health():
        service.check_engine()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics():
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app
