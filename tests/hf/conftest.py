"""Fixtures of the tests of the ecosystem."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers.ecosystem import SENTENCES, batch_for, save_head, sentence_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return sentence_tokenizer()


@pytest.fixture
def folder(head, tokenizer, tmp_path) -> Path:
    """A saved model of the class `head` and its tokenizer."""
    return save_head(head, tokenizer, tmp_path / "model")


@pytest.fixture
def inputs(head, tokenizer) -> dict[str, torch.Tensor]:
    return batch_for(head, tokenizer, SENTENCES)
