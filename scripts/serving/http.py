"""Errors in the form that OpenAI's clients read, what is asked of a request before it is read, and its body."""

import asyncio
import hmac
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from modeling_tnn.serving.scheduler import QueueFullError

# The status of a response that nobody reads, as nginx writes it.
GONE = 499
# Status -> kind of error.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
# Status -> headers: OpenAI's clients try again but for what took too long.
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 504: {"X-Should-Retry": "false"}}
# Names of this machine.
LOCAL = ("127.0.0.1", "::1", "localhost")


class ApiError(HTTPException):
    """An error for the client: its status, a `code` for programs, and the wrong field of the body (`parameter`)."""

    def __init__(self, status: int, message: str, code: str | None = None, parameter: str | None = None):
        super().__init__(status, message, HEADERS.get(status))
        self.code, self.parameter = code, parameter

    def content(self) -> dict:
        """The body of the error."""
        kind = KINDS.get(self.status_code, "invalid_request_error")
        message = self.detail.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be written
        return {"error": {"message": message, "type": kind, "param": self.parameter, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content(), self.status_code, self.headers)


def handle_errors(app: FastAPI):
    """Answer every error of the routes in this form."""

    @app.exception_handler(HTTPException)
    async def of_route(request: Request, error: HTTPException):
        if isinstance(error, ApiError):
            return error.response()
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        found.headers = error.headers
        return found.response()

    @app.exception_handler(QueueFullError)
    async def of_queue(request: Request, error: QueueFullError):
        return ApiError(429, str(error), "queue_full").response()

    @app.exception_handler(Exception)
    async def of_server(request: Request, error: Exception):
        return ApiError(500, "The server failed; its log has the reason.").response()


class Checks:
    """Answer what must not come in before it is read, and count responses by route and status, when they begin.

    Clients must send the `key`, if there is one, but for `/health`. Without it, a `host` of this machine has no other
    name: else a page could call it by that of its own site, which leads to this machine.
    """

    def __init__(self, app, key: str | None, host: str | None, responses: Counter):
        self.app, self.key, self.responses = app, key and key.encode(), responses
        self.names = {*LOCAL, host} if key is None and host in LOCAL else None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message):
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path, of which anybody could make as many as they like
                self.responses.labels(getattr(route, "path", "unknown"), message["status"]).inc()
            await send(message)

        error = self._refusal(Headers(scope=scope), scope["path"])
        scope["path"] = scope["path"].rstrip("/") or "/"
        await (self.app if error is None else error.response())(scope, receive, counted)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may read another end of the body
            error = ApiError(400, "A body must have Content-Length or Transfer-Encoding, got both", "two_lengths")
            error.headers = {"Connection": "close"}
            return error
        if self.names and name_of_host(headers.get("host", "localhost")) not in self.names:
            message = "The header Host must be localhost on a server without a key (--api_key, TNN_API_KEY)"
            return ApiError(400, f"{message}, got {headers['host']}", "invalid_host")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        has_key = scheme.lower() == "bearer" and hmac.compare_digest(given.strip(" ").encode(), self.key or b"")
        if self.key and path != "/health" and not has_key:
            message = "The key must be that of the server, in a header `Authorization: Bearer KEY`."
            return ApiError(401, message, "invalid_api_key")
        return None


def name_of_host(host: str) -> str | None:
    """The name in a header `Host`, without the port; None if there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request, which is JSON; ApiError if it is not, is too long, or does not come in time.

    Without a Content-Type it is taken as JSON, unless a browser sends it: that asks no server whether it may.
    """
    kind = request.headers.get("content-type", "" if "origin" in request.headers else "application/json")
    if not kind.partition(";")[0].strip().lower().endswith(("/json", "+json")):
        message = f"The header Content-Type must be application/json, got {kind or 'none'}"
        raise ApiError(400, message, "content_type")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(413, f"The body must have at most {most:,} bytes.", "body_too_large")
    except TimeoutError:
        raise ApiError(408, f"The body must come within {seconds:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(GONE, "The client went away.") from None
    return bytes(body)


def write_body(head: dict, name: str, items: Iterable[dict]) -> bytes:
    """The JSON of `head` with a list `items`, one by one: `json` lets no other thread run while it writes."""
    listed = ", ".join(json.dumps(item, ensure_ascii=False, allow_nan=False) for item in items)
    return f'{json.dumps(head)[:-1]}, "{name}": [{listed}]}}'.encode()
