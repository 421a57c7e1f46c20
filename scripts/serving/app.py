"""The routes of OpenAI's API over one causal TNN.

    /v1/models  /v1/completions  /v1/chat/completions  /health  /metrics

A client that goes away ends its texts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from tnn_scripts.serving.answers import Form, event, failure
from tnn_scripts.serving.errors import handle_errors
from tnn_scripts.serving.middleware import ApiKey, BodyLimit, CountResponses
from tnn_scripts.serving.schema import Body, ChatBody, CompletionBody
from tnn_scripts.serving.service import Service
from tnn_scripts.serving.text import Text

# The status of a response that nobody reads, as nginx writes it.
GONE = 499


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
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app
