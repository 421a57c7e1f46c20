"""Texts that are put into the rows of a cache: every later token is that of the text alone."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from helpers.caches import MODELS
from helpers.models import lively_language_model, relative_error, slow
from modeling_tnn.serving.rows import bytes_of_text, drop_padding, insert_rows, rows_of
from modeling_tnn.tools.comparing import memory_per_sequence

# Kinds of states, and settings with which a block or a history has another form.
MORE = {"rpe-long": {"tno_type": "rpe", "decay": 0.97}, "fd-tiles": {"tno_type": "fd", "fd_resolution": 8192}}
EVERY_MODEL = pytest.mark.parametrize(
    "name",
    ["rpe-long", "fd-tiles", "rtf", "modal", "sliding", "multihyena", *slow("rpe-no-decay", "sinusoidal", "hyena")],
)
TEXTS = torch.randint(2, 99, (6, 1400), generator=torch.Generator().manual_seed(0))


def model_of(name):
    return lively_language_model(**(MODELS | MORE)[name])


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
        insert_rows(self.cache, other.cache, rows)
        assert not any(layer.get_seq_length() for layer in other.cache.layers)
        for row, text in zip(rows, other.texts, strict=True):
            self.texts[row : row + 1] = [text]
        self.drop()

    def drop(self):
        """The padding that all rows have."""
        held = int(self.cache.get_seq_length())
        drop_padding(self.cache, held - max(map(len, self.texts)))

    def unchecked(self, count):
        """The logits after so many further tokens of all texts."""
        for _ in range(count):
            for text in self.texts:
                text.append((7 * len(text) + text[-1]) % 97 + 2)
            logits = self.forward(torch.tensor([[text[-1]] for text in self.texts]))
        return logits[:, -1] if count else None

    @torch.no_grad()
    def steps(self, count):
        """Checked against each text alone without a cache."""
        for _ in range(count):
            for row, text in zip(self.unchecked(1), self.texts, strict=True):
                alone = self.model(torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]
                assert relative_error(row, alone) < 1e-9


@EVERY_MODEL
def test_texts_that_come_later(name):
    """Longer and shorter ones than those that are there, in a block that has begun or not."""
    for steps in (0, 70):
        batch = Batch(model_of(name))
        batch.put(batch.read(TEXTS[0, :9], TEXTS[1, :40]), [0, 1])
        batch.unchecked(steps)
        batch.put(batch.read(TEXTS[2, :3], TEXTS[3, :150]), [2, 3])
        batch.steps(2)
        batch.unchecked(20)
        batch.put(batch.read(TEXTS[4, :20]), [4])
        batch.steps(1)
        batch.unchecked(65 if steps else 30)
        batch.steps(1)


@EVERY_MODEL
def test_texts_that_replace_others(name):
    """In place, shorter and longer than all; then rows are chosen, tokens taken back, a chunk read, a copy made."""
    batch = Batch(model_of(name))
    batch.put(batch.read(TEXTS[0, :90], TEXTS[1, :5], TEXTS[2, :30]), [0, 1, 2])
    batch.unchecked(9)
    batch.put(batch.read(TEXTS[3, :2], TEXTS[4, :10]), [0, 2])
    batch.steps(2)
    batch.put(batch.read(TEXTS[5, :300]), [1])
    batch.steps(1)
    batch.unchecked(130)
    batch.put(batch.read(TEXTS[5, :4]), [1])
    batch.steps(1)
    batch.put(batch.read(TEXTS[2, :70]), [2])
    batch.unchecked(3)
    batch.cache.batch_select_indices(torch.tensor([2, 0]))
    batch.texts = [batch.texts[2], batch.texts[0]]
    batch.drop()
    batch.steps(1)
    if name != "sliding":  # a full window of attention cannot be cropped
        batch.cache.crop(-2)
        batch.texts = [text[:-2] for text in batch.texts]
    batch.steps(1)
    chunk = TEXTS[3:5, :7]
    batch.texts = [text + new.tolist() for text, new in zip(batch.texts, chunk, strict=True)]
    batch.forward(chunk)
    batch.cache = copy.deepcopy(batch.cache)
    batch.steps(1)


@pytest.mark.parametrize("name", ["rpe-no-decay", "fd-tiles", "rtf", "sliding", "multihyena"])
def test_bytes_of_a_text(name):
    """The bound holds while the text is written token by token, and is not far above."""
    model, length, most = model_of(name), 700, 0
    batch, whole = Batch(model), DynamicCache()
    batch.texts = [TEXTS[0, :length].tolist()]
    batch.forward(TEXTS[:1, :length])
    insert_rows(whole, batch.cache, [0])
    for index in range(160):
        with torch.no_grad():
            mask = torch.ones(1, length + index + 1)
            model(TEXTS[:1, index : index + 1], attention_mask=mask, past_key_values=whole, use_cache=True)
        most = max(most, memory_per_sequence(whole) if index > 80 else 0)
    bound = bytes_of_text(model.get_decoder(), length + 160)
    assert most <= bound <= 3 * most
    # Texts that are shorter than the block of the row that they replace, and of the row beside which they are put.
    for index, row in enumerate((0, 0, 1)):
        insert_rows(whole, Batch(model).read(TEXTS[index, : 4 - index]).cache, [row])
        drop_padding(whole, int(whole.get_seq_length()) - (4 if row else 4 - index))
        with torch.no_grad():
            mask = torch.ones(1 + row, int(whole.get_seq_length()) + 1)
            model(TEXTS[: 1 + row, :1], attention_mask=mask, past_key_values=whole, use_cache=True)
        assert memory_per_sequence(whole) <= bytes_of_text(model.get_decoder(), 6)


def test_what_is_refused():
    model = model_of("rpe")
    batch, empty = (Batch(model).read(TEXTS[0, :9]).cache for _ in range(2))
    static = StaticCache(config=model.config, max_cache_len=50)
    with pytest.raises(ValueError, match="`cache` must be a dynamic cache"):
        insert_rows(static, batch, [0])
    for rows in ([], [0, 1], [2], [-1]):
        with pytest.raises(ValueError, match="`rows` must be 1 different rows below 1"):
            insert_rows(batch, empty, rows)
    insert_rows(batch, empty, [1])
    assert rows_of(batch) == 2 and rows_of(empty) == 0 and empty.get_seq_length() == 0
