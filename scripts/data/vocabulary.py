"""A check that a tokenizer is that of a model."""

from transformers import PreTrainedTokenizerBase


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int):
    """Check that a model has an embedding for every id of its tokenizer. Without one, a GPU would end the process.

    Raises:
        ValueError: an id is `vocab_size` or more.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise ValueError(
            f"Ids of the tokenizer must be below vocab_size={vocab_size} of the model, got {highest} for {token!r}."
            f" It has {len(tokenizer)} tokens."
        )
