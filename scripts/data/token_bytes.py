"""How many bytes of a text its first tokens span.

Bits per byte compare models whatever their tokenizers are, if the bytes are those of the tokens that were scored.
"""

from transformers import PreTrainedTokenizerBase


def bytes_until(texts: list[str], tokens: list[list[int]], tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """Bytes of the text, in UTF-8, up to the end of its first `count` tokens.

    What lies between two tokens belongs to the second one, and what ends a line to the last token of the line. A token
    that ends within a character has all of it. Tokenizers that know no places in the text (those in Python) are exact
    at the ends of lines; within a line, bytes are in proportion to tokens.

    Args:
        texts: lines, counted with one line break behind each.
        tokens: their ids, as `corpus.tokenize` gives them.
        count: from 0 to the number of ids.
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
    """Of the first `count` ids of a line."""
    if not tokenizer.is_fast:
        return round(len(line.encode()) * count / len(ids))
    places = tokenizer(line, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return len(line[: places[count - 1][1]].encode())
