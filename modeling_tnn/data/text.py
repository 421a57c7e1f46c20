"""Text as tokens: a tokenizer that is trained on it, and blocks of tokens for training."""

import logging
from typing import TYPE_CHECKING

from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("data")
SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# Further tokens of a masked language model; its sentences are between <s> and </s>.
MASKED_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
ROWS_AT_ONCE = 10_000


def train_tokenizer(texts: "Dataset", vocab_size: int, masked=False, lowercase=False) -> PreTrainedTokenizerFast:
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
        raise ValueError(f"`vocab_size` must be at least {least} for all bytes and special tokens, got {vocab_size}")
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


def pack(
    texts: "Dataset",
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    enclose: bool = False,
    split: str = "train",
    num_proc: int = 1,
) -> "Dataset":
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
