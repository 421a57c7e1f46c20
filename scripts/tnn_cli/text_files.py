"""Text that a user gives: files, by their suffix, and lines of the standard input."""

import collections
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tnn_cli.model_path import check_path

# UTF-8, with or without the byte order mark that some editors write.
ENCODING = "utf-8-sig"
BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
FASTA = (".fa", ".fasta", ".fna")
COMPRESSED = (".gz", ".bgz")


def check_file(file: str, whole: bool = True):
    """Check that a file has content and, read to its end if `whole`, that it is UTF-8.

    Raises:
        ValueError: it is missing, empty, or not text.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"The file {file} does not exist.")
    if path.stat().st_size == 0:
        raise ValueError(f"The file {file} is empty.")
    if whole and builder_of(file) != "parquet":
        try:
            with open_text(file) as lines:
                collections.deque(lines, maxlen=0)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"The file {file} is not text in UTF-8: {error}") from error


def read_lines_of(file: str) -> list[str]:
    """The lines of a text file, as `datasets` reads them; errors are those of `check_file`."""
    check_file(file)
    with open_text(file) as lines:
        return [line.removesuffix("\n") for line in lines]


def open_text(file: str) -> IO[str]:
    """A text file, also below .gz or .bgz, for reading. Not `str.splitlines`: it divides lines at U+2028."""
    return (gzip.open if Path(file).suffix.lower() in COMPRESSED else open)(file, "rt", encoding=ENCODING)


def builder_of(file: str) -> str:
    """The kind of a file by its suffix, also below .gz; text if it has another suffix or none.

    Raises:
        ValueError: it is a table with another separator than commas, or FASTA, which has no rows.
    """
    if is_fasta(file):
        raise ValueError(f"FASTA is read as a genome by `tnn pretrain` alone, got {file}")
    path = Path(file.lower().removesuffix(".gz"))
    if path.suffix == ".tsv":
        raise ValueError(f"Tables must be .csv, .json, .jsonl or .parquet files, got {file}")
    return BUILDERS.get(path.suffix, "text")


def is_fasta(file: str) -> bool:
    """Whether a name is that of a FASTA file, by its suffix, also below .gz or .bgz."""
    path = Path(file.lower())
    return (Path(path.stem) if path.suffix in COMPRESSED else path).suffix in FASTA


def looks_like_file(source: str) -> bool:
    """Whether a source is a local file, not a folder or a Hub id."""
    return not Path(source).is_dir() and (
        Path(source).is_file() or Path(source).suffix.lower() in BUILDERS or is_fasta(source)
    )


def check_source(source: str):
    """Check that a text or a data set is a file with content, a folder, or could be a Hub id, else ValueError."""
    if looks_like_file(source):
        check_file(source, whole=False)
    else:
        check_path(source, "--dataset_name")


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
