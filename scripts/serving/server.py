"""uvicorn with a bound on connections, on the time that a client may take, and on that of a shutdown.

uvicorn answers 503 above `limit_concurrency`, and limits headers and idle connections between requests. This adds: no
more than twice as many connections stay open; who sends or reads nothing is disconnected; a shutdown lets texts end,
and ends those that take too long as an error for their clients.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tnn_scripts.serving.arguments import ApiArguments

logger = logging.getLogger("api")

# A message that attackers could repeat is logged once in so many seconds.
REPEAT = 60
# Seconds after the drain in which the last words of ended texts are sent.
GRACE = 5


class Connection(H11Protocol):
    """A connection that is closed if there are too many, or if its client keeps it waiting for `seconds`."""

    def __init__(self, *given, seconds: float, warn: Callable[[str], None], **settings):
        super().__init__(*given, **settings)
        self.seconds, self.warn = seconds, warn
        self._check_task: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport):
        super().connection_made(transport)
        most = self.limit_concurrency
        if len(self.connections) >= most:
            self.warn(f"--max_concurrent: {most - 1} connections are open, further ones get status 503")
        if len(self.connections) >= 2 * most:
            transport.abort()
            return
        self._waits_since = self.loop.time()
        self._check_task = self.loop.call_later(self.seconds, self._check)

    def connection_lost(self, exc: Exception | None):
        super().connection_lost(exc)
        if self._check_task is not None:
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

    Args:
        args: with the address, how many connections are served (twice as many may be open), and seconds.
        stop: ends all texts, so that each client gets an answer. Called when the drain has lasted too long, or after a
            second signal.
    """

    def __init__(self, app, args: ApiArguments, stop: Callable[[], None]):
        self.stop, self.drain_seconds, self._warned = stop, args.drain_seconds, {}
        connection = partial(Connection, seconds=args.read_seconds, warn=self.warn)
        config = uvicorn.Config(
            app, args.host, args.port, http=connection, ws="none", lifespan="off", log_level="error",
            server_header=False, limit_concurrency=args.max_concurrent + 1, backlog=args.max_concurrent,
            timeout_graceful_shutdown=args.drain_seconds + GRACE,
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)

    async def startup(self, sockets=None):
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self.report)
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

    def report(self, loop: asyncio.AbstractEventLoop, context: dict):
        """Log errors of the system in a line, as those of too many open files; others are mistakes of the program."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self.warn(f"{context['message']}: {error.strerror or error}")
        else:
            loop.default_exception_handler(context)

    def warn(self, message: str):
        """Log a message, unless it was logged a moment ago."""
        now = time.monotonic()
        if now - self._warned.get(message, -REPEAT) >= REPEAT:
            self._warned[message] = now
            logger.warning("%s", message)


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record is of something else than requests that a shutdown has ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
