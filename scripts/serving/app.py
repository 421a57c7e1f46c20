"""The routes of OpenAI's API over one causal TNN.

    /v1/models  /v1/completions  /v1/chat/completions  /health  /metrics

A client that goes away ends its texts.
"""

import asyncio
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from itertools import accumulate

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

from modeling_tnn.serving.logprobs import Scored, of_chat, of_completion
from tnn_programs.serving.engine import Piece, Text
from tnn_programs.serving.http import GONE, ApiError, Checks, handle_errors, read_body, write_body
from tnn_programs.serving.pieces import Pieces
from tnn_programs.serving.schema import Body, ChatBody, CompletionBody, Parsed, parse
from tnn_programs.serving.service import Service


class Form:
    """The form of the answers to one request for `texts`."""

    def __init__(self, service: Service, body: Body, texts: list[Text]):
        self.service, self.body, self.texts, self.created = service, body, texts, int(time.time())
        self.is_chat = isinstance(body, ChatBody)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex

    def whole(self) -> bytes:
        """The answer with all texts."""
        return write_body(self._head("") | self._usage(), "choices", map(self._whole, self.texts))

    def first(self, text: Text) -> dict | None:
        """The event before a text: the role of a message."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": text.index, "delta": delta, "finish_reason": None}
        return self._head(".chunk", choice) if self.is_chat else None

    def piece(self, text: Text, piece: Piece) -> dict:
        """An event with a piece of a text, and the reason of its end if it has ended."""
        body = {"delta": {"content": piece.text} if piece.text else {}} if self.is_chat else {"text": piece.text}
        return self._head(".chunk", self._choice(text, piece, body))

    def last(self) -> dict:
        """The event with the number of tokens."""
        return self._head(".chunk") | {"choices": []} | self._usage()

    def _whole(self, text: Text) -> dict:
        piece = text.take()
        is_chat, message = self.is_chat, {"role": "assistant", "content": piece.text}
        return self._choice(text, piece, {"message": message} if is_chat else {"text": piece.text})

    def _choice(self, text: Text, piece: Piece, body: dict) -> dict:
        logprobs = None if self.body.likeliest is None else self._logprobs(text, piece)
        return {"index": text.index} | body | {"logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, text: Text, piece: Piece) -> dict:
        scored, offsets, request = text.request.logprobs[piece.tokens], text.offsets[piece.tokens], text.request
        if self.is_chat:
            return of_chat(self.service.text_of, scored)
        if self.body.echo and piece.tokens.start == 0:
            prompt = request.ids[0, : request.prompt_length].tolist()
            pieces = Pieces(self.service.tokenizer, ())
            offsets = [0, *accumulate(len(pieces.add(token)) for token in prompt)][:-1] + offsets
            scored = [Scored(prompt[0]), *request.prompt_logprobs, *scored]
        return of_completion(self.service.text_of, scored, offsets)

    def _head(self, kind: str, *choices: dict) -> dict:
        name = f"chat.completion{kind}" if self.is_chat else "text_completion"
        head = {"id": self.id, "object": name, "created": self.created, "model": self.service.name}
        return head | ({"choices": list(choices)} if choices else {})

    def _usage(self) -> dict[str, dict]:
        new = sum(len(text.offsets) for text in self.texts)
        read = sum(text.request.prompt_length for text in self.texts[:: self.body.n])
        return {"usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}}


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


async def answer(service: Service, request: Request, body: Body) -> Response:
    """The response to a request: all texts at once, or a stream of their pieces; ApiError if there is none."""
    news: asyncio.Queue[Text] = asyncio.Queue()
    loop, client = asyncio.get_running_loop(), request.client and request.client.host
    texts = await run_in_threadpool(service.begin, body, news, loop, client)
    form, timer = Form(service, body, texts), loop.call_later(service.args.max_seconds, service.end_late, texts)

    def leave():
        timer.cancel()
        service.leave(texts)

    if body.stream:
        return EventStream(events(news, form), leave)
    try:
        if not await finished(texts, news, request):
            return Response(status_code=GONE)
    finally:
        leave()
    for error in filter(None, map(failure, texts)):
        raise error
    return Response(await run_in_threadpool(form.whole), media_type="application/json")


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


async def events(news: asyncio.Queue, form: Form) -> AsyncIterator[str]:
    """The pieces of all texts as they come, and the number of tokens at the end if it is asked for."""
    for opening in filter(None, map(form.first, form.texts)):
        yield event(opening)
    open_texts, is_noted = set(form.texts), form.body.likeliest is not None
    while open_texts:
        text = await news.get()
        if text not in open_texts:
            continue
        piece = text.take()
        if piece.finish_reason:
            open_texts.remove(text)
        if piece.finish_reason and (error := failure(text)):
            yield event(error.content())
        elif is_noted and (piece.finish_reason or piece.tokens.start < piece.tokens.stop):
            yield event(await run_in_threadpool(form.piece, text, piece))  # of a prompt it may be long
        elif piece.finish_reason or piece.text:
            yield event(form.piece(text, piece))
    if form.body.stream_options.include_usage:
        yield event(form.last())
    yield event("[DONE]")


def build_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application with all routes, for those who have the key if there is one."""
    args = service.args
    app = FastAPI(openapi_url=None)
    handle_errors(app)
    app.add_middleware(Checks, key=api_key, host=args.host, responses=service.metrics.responses)
    if args.allowed_origins:  # outside of the checks: a browser asks whether it may without a key
        names = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["Retry-After", "X-Should-Retry"]}
        app.add_middleware(CORSMiddleware, allow_origins=args.allowed_origins, **names)
    get = functools.partial(app.api_route, methods=["GET", "HEAD"])

    async def read(kind: type[Parsed], request: Request) -> Parsed:
        data = await read_body(request, args.max_body_bytes, args.read_seconds)
        body = await run_in_threadpool(parse, kind, data)
        service.check_model(body.model)
        return body

    @get("/v1/models")
    async def models():
        return {"object": "list", "data": [service.card]}

    @get("/v1/models/{name:path}")
    async def model(name: str):
        service.check_model(name)
        return service.card

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await answer(service, request, await read(CompletionBody, request))

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        return await answer(service, request, await read(ChatBody, request))

    @get("/health")
    async def health():
        service.check_engine()
        return {"status": "ok"}

    @get("/metrics")
    async def metrics():
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app
