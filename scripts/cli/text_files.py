"""Text that a user gives: files, by their suffix, and lines of the standard input."""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tnn_programs.cli.model_path import check_path, light_module

FILES = light_module("data/files.py")
BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
FASTA = (".fa", ".fas", ".fasta", ".fna", ".ffn", ".faa", ".frn", ".fsa", ".fsa_nt", ".mfa", ".mpfa", ".pep")
# Of other forms, which would be read as text.
NO_TEXT = {".tsv": "Tables must be .csv, .json, .jsonl or .parquet files"} | dict.fromkeys(
    (".fastq", ".fq", ".gb", ".gbk", ".gff", ".gff3", ".vcf", ".sam"), "Sequences must be FASTA files"
)
# Of a file that is streamed, the bytes that are checked before.
CHECKED_OF_STREAM = 2**30
# Deeper JSON ends the process inside a library.
DEEPEST = 60
STRING, BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"'), re.compile(r"[\[\]{}]")


def check_file(file: str, whole: bool = True, most: float = float("inf")):
    """Check that a file has content and, if `whole`, that its first `most` bytes are UTF-8, and rows of its kind."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"The file {file} does not exist.")
    if path.stat().st_size == 0:
        raise ValueError(f"The file {file} is empty.")
    if whole and (builder := builder_of(file)) != "parquet":
        with FILES.reading(file) as lines:
            {"csv": check_table, "json": check_nesting, "text": check_letters}[builder](lines, file, most)


def check_letters(text: IO[str], file: str, most: float):
    """Read text by pieces: a line may be long."""
    while text.buffer.tell() <= most and text.read(2**20):
        pass


def check_table(lines: IO[str], file: str, most: float):
    """Check that rows have as many fields as the header. pandas would take some for the names of rows."""
    csv.field_size_limit(2**31 - 1)
    rows, header, start = csv.reader(lines, strict=True), [], 1
    try:
        for row in rows:
            header = header or row
            if row and len(row) != len(header):
                raise csv.Error(f"{len(row)} fields, where the header has {len(header)}: {str(row)[:80]}")
            if row is header and (twice := [name for name in row if name and row.count(name) > 1]):
                raise csv.Error(f"two columns with the name {twice[0]!r}")
            start = rows.line_num + 1
            if lines.buffer.tell() > most:
                return
    except csv.Error as error:
        rule = "with double quotes around text that has commas, line breaks or quotes, each of them twice"
        raise ValueError(f"Line {start} of {file} must be a row of CSV, {rule}, got {error}") from error


def check_nesting(lines: IO[str], file: str, most: float):
    """Check that JSON is not nested too deep for the libraries that read it."""
    depth = 0
    for number, line in enumerate(lines, 1):
        for bracket in BRACKET.findall(STRING.sub("", line)):
            depth += 1 if bracket in "[{" else -1
            if depth > DEEPEST:
                raise ValueError(f"Line {number} of {file} must have JSON of at most {DEEPEST} levels, got more")
        if lines.buffer.tell() > most:
            return


def suffix_of(file: str) -> str:
    """The suffix of a name in lower case, of what is compressed if it is."""
    path = Path(file.lower())
    return (Path(path.stem) if path.suffix in FILES.COMPRESSED else path).suffix


def builder_of(file: str) -> str:
    """The kind of a file by its suffix, also below .gz or .bgz; text if it has another suffix or none."""
    if is_fasta(file):
        raise ValueError(f"FASTA is read as a genome by `tnn pretrain` alone, got {file}")
    if message := NO_TEXT.get(suffix_of(file)):
        raise ValueError(f"{message}, got {file}")
    return BUILDERS.get(suffix_of(file), "text")


def is_fasta(file: str) -> bool:
    """Whether a file is FASTA by its suffix, or else by its first lines: a title after `>`, then letters alone."""
    suffix = suffix_of(file)
    if suffix in FASTA or suffix in (BUILDERS | NO_TEXT) and suffix != ".txt" or not Path(file).is_file():
        return suffix in FASTA
    try:
        with FILES.open_text(file) as text:
            title, *lines = text.read(2**16).strip().split("\n")
    except (OSError, ValueError, *FILES.DAMAGED):  # who reads the file says so
        return False
    letters = "".join(line.rstrip() for line in lines if not line.startswith(">"))
    return title.startswith(">") and letters.replace("*", "").replace("-", "").isalpha()


def looks_like_file(source: str) -> bool:
    """Whether a source is a local file, not a folder or a Hub id."""
    path = Path(source)
    return not path.is_dir() and (path.is_file() or path.suffix.lower() in BUILDERS or is_fasta(source))


def check_source(source: str):
    """Check that a text or a data set is a file with content, a folder, or could be a Hub id."""
    if looks_like_file(source):
        check_file(source, whole=False)
    else:
        check_path(source, "--dataset_name")


def read_lines() -> Iterator[str]:
    """The lines of the standard input until an empty one or the end; a terminal shows where to write."""
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
    """Refuse what no tokenizer takes: lone surrogates, as which Python reads bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text in UTF-8, got {ascii(text[:100])}") from error
