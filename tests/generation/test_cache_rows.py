"""Texts that are put into the rows of a cache: every later token is that of the text alone."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from helpers.hybrids import HYBRIDS
from helpers.models import exhaustive, lively_language_model, relative_error
from modeling_tnn import TnnForCausalLM
from modeling_tnn.cache_rows import bytes_of_text, drop_padding, put_texts, rows_of
from modeling_tnn.cache_tnn import memory_per_sequence

MODELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-long": {"tno_type": "rpe", "decay": 0.97},
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.8, "learnable_decay": True},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None},
    "fd": {"tno_type": "fd", "fd_resolution": 32},
    "fd-tiles": {"tno_type": "fd", "fd_resolution": 8192},
    "rtf": {"tno_type": "rtf"},
    "modal": {"tno_type": "modal"},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 50},
    "sinusoidal": {"tno_type": "rpe", "decay": 0.9, "position_embedding": "sinusoidal"},
    "hybrid": {"tno_type": "rpe", "decay": 0.9} | HYBRIDS["full"],
    "hybrid-sliding": {"tno_type": "rtf"} | HYBRIDS["sliding"],
    "attention": HYBRIDS["attention"],
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
TEXTS = torch.randint(2, 99, (6, 1400), generator=torch.Generator().manual_seed(0))


def model_of(name):
    return lively_language_model(**MODELS[name])


class Batch:
    """A cache with the texts in its rows, and their masks: what a scheduler keeps, in its simplest form."""

    def __init__(self, model):
        self.model, self.cache, self.texts = model, DynamicCache(), []

    def read(self, *texts):
        """A left-padded batch of new texts."""
        batch = Batch(self.model)
        batch.texts = [text.tolist() for text in texts]
        longest = max(map(len, texts))
        ids = torch.stack([torch.nn.functional.pad(text, (longest - len(text), 0)) for text in texts])
        batch.forward(ids)
        return batch

    def mask(self):
        longest = max(map(len, self.texts))
        return torch.stack([torch.arange(longest) >= longest - len(text) for text in self.texts])

    def forward(self, ids):
        with torch.no_grad():
            output = self.model(ids, attention_mask=self.mask(), past_key_values=self.cache, use_cache=True)
        return output.logits

    def put(self, other, rows):
        put_texts(self.cache, other.cache, rows)
        for row, text in zip(rows, other.texts, strict=True):
            self.texts[row : row + 1] = [text]
        self.drop()

    def drop(self):
        """The padding that all rows have."""
        held = int(self.cache.get_seq_length())
        drop_padding(self.cache, held - max(map(len, self.texts)))

    def step(self, ids):
        """The next tokens of all texts, checked against each text alone without a cache."""
        for text, token in zip(self.texts, ids.tolist(), strict=True):
            text.append(token)
        logits = self.forward(ids[:, None])[:, -1]
        for text, row in zip(self.texts, logits, strict=True):
            with torch.no_grad():
                alone = self.model(torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]
            assert relative_error(row, alone) < 1e-9

    def steps(self, count):
        for _ in range(count):
            self.step(torch.tensor([(7 * len(text) + text[-1]) % 97 + 2 for text in self.texts]))


@EVERY_MODEL
@pytest.mark.parametrize("steps", [0, 1, 70, *exhaustive(31, 64, 127, 128, 129, 200)])
def test_texts_that_come_later(name, steps):
    """Longer and shorter ones than those that are there, in a block that has begun or not."""
    model = model_of(name)
    batch = Batch(model)
    batch.put(batch.read(TEXTS[0, :9], TEXTS[1, :40]), [0, 1])
    unchecked(batch, steps)
    batch.put(batch.read(TEXTS[2, :3], TEXTS[3, :150]), [2, 3])
    batch.steps(4)
    unchecked(batch, 60)
    batch.put(batch.read(TEXTS[4, :20]), [4])
    batch.steps(2)
    unchecked(batch, 65)
    batch.steps(2)


def unchecked(batch, count):
    """Many steps with one look at the end."""
    for _ in range(count):
        for text in batch.texts:
            text.append((7 * len(text) + text[-1]) % 97 + 2)
        batch.forward(torch.tensor([[text[-1]] for text in batch.texts]))
