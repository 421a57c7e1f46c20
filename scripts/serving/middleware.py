"""What is asked of a request before it is read, and the count of responses."""

import asyncio
import hmac

from tnn_scripts.serving.errors import ApiError
from tnn_scripts.serving.metrics import Metrics


class BodyLimit:
    """Read at most `most` bytes of a body, in at most `seconds`."""

    def __init__(self, app, most: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope, receive, send):
        """Raise the errors where a route reads the body."""
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
    """Ask for a key, but for `/health`."""

    def __init__(self, app, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        """Answer 401 to who has not the key, before anything is read."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        answer = self.app
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self.expected):
            message = "The key must be that of the server, in a header `Authorization: Bearer KEY`."
            answer = ApiError(401, message, "invalid_api_key").response()
        await answer(scope, receive, send)


class CountResponses:
    """Count responses by route and status."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        """Count the response when it begins."""

        async def counted(message):
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path, of which anybody could make as many as they like
                self.metrics.responses.labels(getattr(route, "path", "unknown"), message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counted)
