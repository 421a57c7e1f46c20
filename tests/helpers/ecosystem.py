"""Sentences, a tokenizer and saved models for the tests of the page "Compatible tools", and the page."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from helpers import models
from helpers.models import AUTO, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMultipleChoice, TnnForQuestionAnswering, TnnForSequenceClassification

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tools.md"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box.",
    "How vexingly quick daft zebras jump over five dozen jugs!",
]
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


class Matrix:
    """The part of the matrix that a file of tests runs: `rows` has the heads of each test.

    heads = Matrix()

    @heads(TnnModel)
    def test_tool(head): ...
    """

    def __init__(self):
        self.rows: dict[str, set[str]] = {}

    def __call__(self, *classes, slow=()):
        """Run a test with each of these classes, and `make test-slow` with those of `slow`; both enter the matrix."""

        def decorate(test):
            self.rows[test.__name__] = {head.__name__ for head in (*classes, *slow)}
            values = [*classes, *models.slow(*slow)]
            return pytest.mark.parametrize("head", values, ids=lambda head: head.__name__)(test)

        return decorate

    def check(self):
        """The page has these rows, and its cells are the heads that the tests run with."""
        names, page = [head.__name__ for head in AUTO], {}
        for line in PAGE.read_text().splitlines():
            if test := re.search(r"\| `(test_\w+)` \|$", line):
                cells = [cell.strip() for cell in line.strip("|").split("|")][1:-1]
                page[test[1]] = {name for name, cell in zip(names, cells, strict=True) if cell == "works"}
        assert {test: page.get(test) for test in self.rows} == self.rows


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SENTENCES, vocab_size=300, special_tokens=list(SPECIAL.values()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)


def save_head(head, tokenizer, folder: Path, **fields) -> Path:
    """A saved model of the class `head` and a tokenizer; the widths are those that int4 groups ask for."""
    causal = head in (TnnForCausalLM, TnnForSequenceClassification)
    fields = {"vocab_size": len(tokenizer), "hidden_size": 64, "eos_token_id": None} | fields
    seeded(head, tiny_config(causal=causal, **fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batch_for(head, tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """A padded batch; for choices with two texts in each row, and without padding where its logits have no bound."""
    if head is TnnForQuestionAnswering:
        texts = texts[:1] * len(texts)
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False))
    if head is TnnForMultipleChoice:
        return {name: torch.stack([value, value.flip(0)], dim=1) for name, value in batch.items()}
    return batch


def first_output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


@torch.no_grad()
def log_likelihood(model, tokenizer, start: str, end: str) -> float:
    """The log likelihood of the tokens of `end` after those of `start`."""
    given, rest = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (start, end))
    logits = model(torch.cat([given, rest], dim=1)).logits[0, given.shape[1] - 1 : -1].log_softmax(-1)
    return logits.gather(1, rest[0][:, None]).sum().item()
