"""Texts that a user writes."""

import sys
from collections.abc import Iterator


def read_lines() -> Iterator[str]:
    """The lines of the standard input until an empty one or the end; a terminal shows where to write.

    Raises:
        ValueError: a line is not UTF-8.
    """
    mark = "\ufeff"  # of a file that is redirected
    while True:
        sys.stdout.write("> " if sys.stdin.isatty() else "")
        sys.stdout.flush()
        line = sys.stdin.readline().removesuffix("\n").removeprefix(mark)
        mark = ""
        if not line.strip():
            return
        check_text("a line", line)
        yield line


def check_text(name: str, text: str):
    """Refuse what no tokenizer takes: lone surrogates, as which Python reads bytes that are not UTF-8.

    Raises:
        ValueError: there are some.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text in UTF-8, got {ascii(text[:100])}") from error
