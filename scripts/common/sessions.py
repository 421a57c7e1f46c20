"""The texts of a page's users: each has one at a time, which a new one or the button Stop ends."""

import time
from collections.abc import Iterator
from contextlib import closing
from threading import Event

from tnn_scripts.common.writing import Settings, Writer

# Seconds between two states of a text that are sent to a browser.
INTERVAL = 0.05


class Sessions:
    """What runs for whom; a session is a tab of a browser, by the name that the server gives it."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.stops: dict[str, Event] = {}

    def begin(self, session: str) -> tuple[str, str]:
        """Make room for a new text, which may have to wait for those of others; what the page shows meanwhile."""
        self.stop(session)
        self.stops[session] = Event()
        return "", "Waiting for the model \N{HORIZONTAL ELLIPSIS}"

    def write(self, session: str, prompt: str, *settings) -> Iterator[tuple[str, str]]:
        """The text so far and a line about it, at most every `INTERVAL` seconds and at the end.

        Nothing comes once another text has taken its place.

        Args:
            settings: those of `Settings`, in their order.
        """
        stop = self.stops.setdefault(session, Event())
        shown = 0.0
        try:
            with closing(self.writer.write(prompt, Settings(*settings), stop)) as states:
                for progress in states:
                    if self.stops.get(session) is not stop:
                        return
                    if progress.end or time.monotonic() - shown > INTERVAL:
                        shown = time.monotonic()
                        yield progress.text, str(progress)
        except ValueError as error:
            yield "", str(error)
        finally:
            if self.stops.get(session) is stop:
                del self.stops[session]

    def stop(self, session: str):
        """End the text of a session, be it written or waiting; the page shows what there is."""
        if session in self.stops:
            self.stops[session].set()

    def leave(self, session: str):
        """End the text of a session whose page is closed."""
        self.stop(session)
        self.stops.pop(session, None)

    def leave_all(self):
        for session in list(self.stops):
            self.leave(session)
