"""uvicorn with a bound on the time that a client may take, and on that of a shutdown.

uvicorn answers 503 above `limit_concurrency`, and limits headers and idle connections between requests. This adds: who
sends or reads nothing is disconnected; a shutdown lets texts end, and ends those that take too long as an error for
their clients.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tnn_programs.cli.serving_arguments import ApiArguments

# Seconds after the drain in which the last words of ended texts are sent.
GRACE = 5


class Connection(H11Protocol):
    """A connection that is closed if its client keeps it waiting for `seconds`."""

    def __init__(self, *given, seconds: float, **settings):
        super().__init__(*given, **settings)
        self.seconds = seconds

    @property
    def limit_concurrency(self) -> int | None:
        """The most connections, for uvicorn at each request; any for /health, which tells whether all is well."""
        return None if self.scope and self.scope["path"] == "/health" else self._limit

    @limit_concurrency.setter
    def limit_concurrency(self, most: int | None):
        self._limit = most

    def connection_made(self, transport: asyncio.Transport):
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._check_task = self.loop.call_later(self.seconds, self._check)

    def connection_lost(self, exc: Exception | None):
        super().connection_lost(exc)
        self._check_task.cancel()

    def on_response_complete(self):
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self):
        self._waits_since = self.loop.time()
        super().pause_writing()

    def _check(self):
        waits = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if waits and self.loop.time() - self._waits_since >= self.seconds:
            self.transport.abort()
        else:
            self._check_task = self.loop.call_later(self.seconds, self._check)


class Server(uvicorn.Server):
    """A server that drains: after Ctrl-C or SIGTERM it takes no requests, and those that run may end.

    `stop` ends all texts, so that each client gets an answer: when the drain has lasted too long, or after a second
    signal.
    """

    def __init__(self, app, args: ApiArguments, stop: Callable[[], None]):
        self.stop, self.drain_seconds = stop, args.drain_seconds
        config = uvicorn.Config(
            app, args.host, args.port, http=partial(Connection, seconds=args.read_seconds), ws="none", lifespan="off",
            log_level="error", server_header=False, limit_concurrency=args.max_concurrent + 1,
            backlog=args.max_concurrent, timeout_graceful_shutdown=args.drain_seconds + GRACE,
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)

    async def startup(self, sockets=None):
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets=None):
        """Let requests end, but not longer than the drain."""
        timer = self._loop.call_later(self.drain_seconds, self.stop)
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame):
        """Begin to drain; the second signal ends it."""
        if self.should_exit:
            self._loop.call_soon_threadsafe(self.stop)
        super().handle_exit(sig, frame)


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record is of something else than requests that a shutdown has ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
