"""uvicorn with a bound on the time of a shutdown: it lets texts end, and ends those that take too long as an error.

uvicorn limits headers and idle connections between requests. Limits for each client are those of a proxy.
"""

import asyncio
import logging
from collections.abc import Callable

import uvicorn

from tnn_programs.cli.serving_arguments import ApiArguments

# Seconds after the drain in which the last words of ended texts are sent.
GRACE = 5


class Server(uvicorn.Server):
    """A server that drains: after Ctrl-C or SIGTERM it takes no requests, and those that run may end.

    `stop` ends all texts, so that each client gets an answer: when the drain has lasted too long, or after a second
    signal.
    """

    def __init__(self, app, args: ApiArguments, stop: Callable[[], None]):
        self.stop, self.drain_seconds = stop, args.drain_seconds
        config = uvicorn.Config(
            app, args.host, args.port, http="h11", ws="none", lifespan="off", log_level="error", server_header=False,
            timeout_graceful_shutdown=args.drain_seconds + GRACE,
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
