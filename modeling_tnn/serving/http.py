"""Errors in the form that OpenAI's clients read, and what is asked of a request before it is read."""

import asyncio
import hmac

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

# Status -> kind of error.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
# Status -> headers: OpenAI's clients try again but for what took too long.
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    504: {"X-Should-Retry": "false"},
}


class ApiError(HTTPException):
    """An error with a status, for the client.

    Args:
        code: a name for programs.
        parameter: the field of the body that is wrong.
    """

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

    @app.exception_handler(RequestValidationError)
    async def of_body(request: Request, error: RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = f"`{place}`: {first['msg']}" if place else first["msg"]
        return ApiError(400, message, first["type"], place or None).response()

    @app.exception_handler(HTTPException)
    async def of_route(request: Request, error: HTTPException):
        if isinstance(error, ApiError):
            return error.response()
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        found.headers = error.headers
        return found.response()

    @app.exception_handler(Exception)
    async def of_server(request: Request, error: Exception):
        return ApiError(500, "The server failed; its log has the reason.").response()


class BodyLimit:
    """Read at most `most` bytes of a body, in at most `seconds`; the errors rise where a route reads it."""

    def __init__(self, app, most: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope, receive, send):
        read, end, is_whole = 0, asyncio.get_running_loop().time() + self.seconds, False

        async def counted():
            nonlocal read, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else end):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"The body must come within {self.seconds:g} seconds.") from None
            read += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if read > self.most:
                raise ApiError(413, f"The body must have at most {self.most:,} bytes.", "body_too_large")
            return message

        await self.app(scope, counted, send)


class ApiKey:
    """Answer 401 to who has not the key, before anything is read, but for `/health`."""

    def __init__(self, app, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        answer = self.app
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self.expected):
            message = "The key must be that of the server, in a header `Authorization: Bearer KEY`."
            answer = ApiError(401, message, "invalid_api_key").response()
        await answer(scope, receive, send)
