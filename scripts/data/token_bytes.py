"""The number of bytes of a text that its first tokens span.

Bits per byte compare models with different tokenizers, if they count the bytes of the scored tokens.
"""

from transformers import PreTrainedTokenizerBase


def bytes_until(texts: list[str], tokens: list[list[int]], tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """The number of bytes of the text, in UTF-8, up to the end of its first `count` tokens.

    Characters between two tokens count for the second one, and those at the end of a line for its last token. A token
    that ends within a character counts the whole character. With tokenizers without offsets (those in Python), the
    result is exact at the ends of lines; within a line, bytes are in proportion to tokens.

    Args:
        texts: lines, counted with one line break after each.
        tokens: their ids, from `text.tokenize`.
        count: number of tokens, from 0 to the number of ids.
    """
    total = 0
    for text, ids in zip(texts, tokens, strict=True):
        if count == 0:
            break
        line = with_line_break(text)
        total += len(line.encode()) if count >= len(ids) else _bytes_within(line, ids, tokenizer, count)
        count -= min(count, len(ids))
    return total


def with_line_break(text: str) -> str:
    return text.rstrip("\n") + "\n"


def _bytes_within(line: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """The number of bytes of the first `count` ids of a line."""
    if not tokenizer.is_fast:
        return round(len(line.encode()) * count / len(ids))
    places = tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return len(line[: places[count - 1][1]].encode())
