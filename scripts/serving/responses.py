"""Errors as responses, and what is asked of a request before it is read."""

import asyncio
import hmac
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tnn_scripts.serving.errors import ApiError, content

# Status -> headers: OpenAI's clients try again but for what took too long.
HEADERS = {429: {"Retry-After": "1"}, 504: {"X-Should-Retry": "false"}}


def response(status: int, *details, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as a response; `details` are those of `content`."""
    return JSONResponse(content(status, *details), status, headers)


def handle(app: FastAPI):
    """Answer every error of the routes in this form."""

    async def of_api(request: Request, error: ApiError):
        return JSONResponse(error.content(), error.status, HEADERS.get(error.status))

    async def of_body(request: Request, error: RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return response(400, f"`{place}`: {first['msg']}" if place else first["msg"], first["type"], place or None)

    async def of_route(request: Request, error: HTTPException):
        return response(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
        )

    async def of_server(request: Request, error: Exception):
        return response(500, "The server failed; its log has the reason.")

    handlers: dict[type[Exception], Callable] = {ApiError: of_api, RequestValidationError: of_body}
    handlers |= {HTTPException: of_route, Exception: of_server}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class BodyLimit:
    """Middleware that reads at most so many bytes of a body, in so many seconds."""

    def __init__(self, app, most: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope, receive, send):
        """Answer 413 to a longer body, whether it says its length or comes in chunks."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        read, refused = 0, response(413, f"The body must have at most {self.most:,} bytes.", "body_too_large")
        if length.isdigit() and int(length) > self.most:
            await refused(scope, receive, send)
            return

        end, is_whole = asyncio.get_running_loop().time() + self.seconds, False

        async def counted():
            nonlocal read, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"The body must come within {self.seconds:g} seconds.") from None
            read += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if read > self.most:
                raise HTTPException(413, f"The body must have at most {self.most:,} bytes.")  # FastAPI hides others
            return message

        await self.app(scope, counted, send)


class ApiKey:
    """Middleware that asks for a key, but for `/health`."""

    def __init__(self, app, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        """Answer 401 to who has not the key, before anything is read."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self.expected):
            message = "The key must be that of the server, in a header `Authorization: Bearer KEY`."
            refused = response(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await refused(scope, receive, send)
            return
        await self.app(scope, receive, send)
