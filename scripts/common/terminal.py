"""Lines that a user writes."""

import sys
from collections.abc import Iterator


def read_lines() -> Iterator[str]:
    """The lines of the standard input until an empty one or the end; a terminal shows where to write."""
    while True:
        sys.stdout.write("> " if sys.stdin.isatty() else "")
        sys.stdout.flush()
        line = sys.stdin.readline().rstrip("\n")
        if not line.strip():
            return
        yield line
