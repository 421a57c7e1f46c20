"""The text of tokens as they come: the pieces of an answer after its prompt, for streams and for search.

The text of a token depends on those before it: tokenizers of the sentencepiece kind drop the space of a first token,
and those with a byte fallback write a character as several tokens. So tokens are decoded after the prompt, whose text
is then left out, and a piece that ends within a character waits for the next token. The `DecodeStream` of tokenizers
fails where such a byte follows a character.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from modeling_tnn.serving.logprobs import INCOMPLETE


class Pieces:
    """Decodes tokens as they come, after those of the `context`, whose text is not part of the pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._context, self._new = list(context), []
        self._before = self._decode(self._context)

    def add(self, token: int) -> str:
        """The text that this token completes; none while it ends within a character."""
        self._new.append(token)
        return self._piece(is_last=False)

    def finish(self) -> str:
        """The text of tokens that wait for others, which do not come."""
        return self._piece(is_last=True) if self._new else ""

    def _piece(self, is_last: bool) -> str:
        text = self._decode(self._context + self._new)
        if text == self._before or (text.endswith(INCOMPLETE) and not is_last):
            return ""
        own, before = self._decode(self._new), self._before
        if not text.startswith(before):  # a prompt may end within a character
            before = before.rstrip(INCOMPLETE)
        # Otherwise a byte that belongs to no character has undone those before it.
        piece = text.removeprefix(before) if text.startswith(before) else own
        # Keep the first byte of an incomplete character in the context.
        self._context, self._new = self._context + self._new if own.endswith(INCOMPLETE) else self._new, []
        self._before = self._decode(self._context)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class PieceStreamer(TextStreamer):
    """Prints the `text` of a generation as `Pieces`: the whole text is that of the tokens after the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool = False, **options):
        super().__init__(tokenizer, skip_prompt, skip_special_tokens=True, **options)
        self.text, self._pieces = "", None

    def put(self, value: torch.Tensor):
        """Take the prompt, or new tokens; the end of `generate` makes the next ones a prompt again."""
        tokens = value.flatten().tolist()
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt, self.text = False, ""
            self._pieces = Pieces(self.tokenizer, tokens)
            self.on_finalized_text("" if self.skip_prompt else self.tokenizer.decode(tokens, skip_special_tokens=True))
        else:
            self._write("".join(map(self._pieces.add, tokens)))

    def end(self):
        """Write the tokens that wait for others."""
        self._write(self._pieces.finish(), stream_end=True)
        self.next_tokens_are_prompt = True

    def _write(self, piece: str, **options):
        self.text += piece
        self.on_finalized_text(piece, **options)
