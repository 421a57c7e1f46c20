"""Text files, also compressed ones."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# UTF-8, with or without the byte order mark that some editors write.
ENCODING = "utf-8-sig"
COMPRESSED = (".gz", ".bgz")
# What reading a damaged archive raises.
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
# Text is a tenth of its size when it is compressed, and a thousandth if it is meant to fill the memory.
MOST_EXPANSION, ALWAYS_READ = 200, 2**26


@contextmanager
def reading(file: str) -> Iterator[IO[str]]:
    """`open_text`, with a ValueError for content that is damaged or not text."""
    try:
        with open_text(file) as lines:
            yield lines
    except (UnicodeDecodeError, *DAMAGED) as error:
        raise ValueError(f"The file {file} is not text in UTF-8: {error}") from error


def read_lines_of(file: str) -> list[str]:
    """The lines of a text file, as `datasets` reads them; errors are those of `reading`."""
    with reading(file) as lines:
        return [line.removesuffix("\n") for line in lines]


class BoundedGzip(gzip.GzipFile):
    """A compressed file whose content is not many times as large."""

    def read1(self, size: int = -1) -> bytes:
        found = super().read1(size)
        if self.tell() > max(ALWAYS_READ, MOST_EXPANSION * os.path.getsize(self.name)):
            raise ValueError(f"{self.name} must be at most {MOST_EXPANSION} times as large as compressed, got more")
        return found


def open_text(file: str) -> IO[str]:
    """A text file, also below .gz or .bgz, for reading. Not `str.splitlines`: it divides lines at U+2028."""
    if Path(file).suffix.lower() in COMPRESSED:
        return io.TextIOWrapper(BoundedGzip(file), encoding=ENCODING)
    return open(file, encoding=ENCODING)
