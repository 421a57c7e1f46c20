"""The routes of OpenAI's API over one causal TNN.

    /v1/models  /v1/completions  /v1/chat/completions  /health  /metrics

A client that goes away ends its texts.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .engine import Text
from .http import ApiError, ApiKey, BodyLimit, handle_errors
from .schema import Body, ChatBody, CompletionBody
from .service import CountResponses, Service

# The status of a response that nobody reads, as nginx writes it.
GONE = 499


class Form:
    """The form of the answers to one request of a `model`, whose prompts have so many tokens."""

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
        return self._head("", choices) | self._usage(texts)

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
        return self._head(".chunk", []) | self._usage(texts)

    def _choice(self, text: Text, body: dict) -> dict:
        return {"index": text.index} | body | {"logprobs": None, "finish_reason": text.finish_reason}

    def _head(self, kind: str, choices: list[dict]) -> dict:
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self, texts: Iterable[Text]) -> dict[str, dict]:
        new = sum(len(text.request.tokens) for text in texts)
        counts = {"prompt_tokens": self.prompts, "completion_tokens": new, "total_tokens": self.prompts + new}
        return {"usage": counts}


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
    """The response to a request: all texts at once, or a stream of their pieces; ApiError if there is none."""
    news: asyncio.Queue[Text] = asyncio.Queue()
    numbers = range(len(prompts) * body.n)
    texts = [Text(service.tokenizer, number, prompts[number // body.n], body.stops(), news) for number in numbers]
    form = Form(service.name, isinstance(body, ChatBody), sum(map(len, prompts)))
    await run_in_threadpool(service.submit, body, prompts, texts)
    timer = asyncio.get_running_loop().call_later(service.args.max_seconds, service.end_late, texts)

    def leave():
        timer.cancel()
        service.leave(texts)

    if body.stream:
        return EventStream(events(texts, news, form, body.stream_options.include_usage), leave)
    try:
        if not await finished(texts, news, request):
            return Response(status_code=GONE)
    finally:
        leave()
    for error in filter(None, map(failure, texts)):
        raise error
    return JSONResponse(form.whole(texts))


async def finished(texts: list[Text], news: asyncio.Queue, request: Request) -> bool:
    """Wait until all texts have ended; whether the client has waited too."""

    async def departure():
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(departure())
    gone.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while not gone.done() and not all(text.is_done for text in texts):
            await news.get()
    finally:
        has_waited = gone.cancel()
    return has_waited


async def events(texts: list[Text], news: asyncio.Queue, form: Form, with_usage: bool) -> AsyncIterator[str]:
    """The pieces of all texts as they come, and the number of tokens at the end if it is asked for."""
    for opening in filter(None, map(form.first, texts)):
        yield event(opening)
    open_texts = set(texts)
    while open_texts:
        text = await news.get()
        if text not in open_texts:
            continue
        is_done = text.is_done
        if is_done:
            open_texts.remove(text)
        if is_done and (error := failure(text)):
            yield event(error.content())
        elif (piece := text.take()) or is_done:
            yield event(form.piece(text, piece))
    if with_usage:
        yield event(form.last(texts))
    yield event("[DONE]")


def build_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application with all routes, for those who have the key if there is one."""
    app = FastAPI(title=f"{service.name}, a Toeplitz neural network", docs_url=None, redoc_url=None)
    handle_errors(app)
    app.add_middleware(BodyLimit, most=service.args.max_body_bytes, seconds=service.args.read_seconds)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(CountResponses, metrics=service.metrics)

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        service.check_model(name)
        return service.card

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request):
        service.check_model(body.model)
        prompts = [await run_in_threadpool(service.tokens, prompt) for prompt in body.prompts()]
        return await answer(service, request, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request):
        service.check_model(body.model)
        prompt = await run_in_threadpool(service.chat_tokens, body)
        return await answer(service, request, body, [prompt])

    @app.get("/health")
    async def health():
        service.check_engine()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics():
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app
