"""Local files of text and of tables: their kinds, and checks before anything slow is imported."""

import collections
import gzip
from pathlib import Path
from typing import IO

from tnn_scripts.common.model_path import check_path

# UTF-8, with or without the byte order mark that some editors write.
ENCODING = "utf-8-sig"
BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


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
    """A text file, or one below .gz, for reading. Not `str.splitlines`: it divides lines at U+2028 and the like."""
    return (gzip.open if Path(file).suffix.lower() == ".gz" else open)(file, "rt", encoding=ENCODING)


def builder_of(file: str) -> str:
    """The kind of a file by its suffix, also below .gz; text if it has another suffix or none.

    Raises:
        ValueError: it is a table with another separator than commas.
    """
    path = Path(file.lower().removesuffix(".gz"))
    if path.suffix == ".tsv":
        raise ValueError(f"Tables must be .csv, .json, .jsonl or .parquet files, got {file}")
    return BUILDERS.get(path.suffix, "text")


def looks_like_file(source: str) -> bool:
    """Whether a source is a local file, not a folder or a Hub id."""
    return not Path(source).is_dir() and (Path(source).is_file() or Path(source).suffix.lower() in BUILDERS)


def check_source(source: str):
    """Check that a text or a data set is a file with content, a folder, or could be a Hub id, else ValueError."""
    if looks_like_file(source):
        check_file(source, whole=False)
    else:
        check_path(source, "--dataset_name")
