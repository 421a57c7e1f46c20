"""Ends from outside: signals, after which a program saves its present step, and other processes that are lost.

Schedulers send SIGTERM some time before SIGKILL. A process that ends by SIGTERM has the exit status 143 (128 + 15),
one that ends by Ctrl-C has 130.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tnn_scripts.common.errors import UserError

import torch

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Where gloo says that a connection has ended or that nothing came, in the texts of plain RuntimeErrors.
OF_GLOO = ("gloo/transport", "[gloo]", "Connection closed by peer", "Connection reset by peer")


class StopRequested(Exception):
    """The exception for a stop by a signal. It is raised where the state of the run can be saved."""


class StopRequest:
    """A context manager that remembers the first signal. `signal` is 0 without one."""

    def __init__(self):
        self.signal = 0
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status of the process. If another process got the signal, it is that of SIGTERM."""
        return 128 + (self.signal or signal.SIGTERM)

    def _remember(self, number, frame):
        self.signal = self.signal or number
        # A second Ctrl-C ends a single process at once. Launchers of several processes may send the first one twice.
        if number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            signal.signal(number, self._previous[number])


class LostProcessError(UserError):
    """The error for a process of the run that has ended, or has not answered in time."""


@contextmanager
def watching_processes() -> Iterator[None]:
    """Turn the errors of communication into one.

    Raises:
        LostProcessError: a process has ended or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in OF_GLOO)):
            raise
        raise LostProcessError(
            "Another process of this run has ended, or has not answered within --ddp_timeout. What it wrote says why "
            f"({' '.join(str(error).split())[:200]})."
        ) from error
