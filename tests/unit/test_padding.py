"""A text gives the same outputs at its real positions, for any side and length of padding."""

import pytest
import torch

from helpers.models import BIDIRECTIONAL, CAUSAL, VARIANTS, exhaustive, padded, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel

HEADS = [(TnnForCausalLM, t, True) for t in CAUSAL] + [(TnnForMaskedLM, t, False) for t in BIDIRECTIONAL]
HEADS += [(cls, t, c) for cls in (TnnModel, TnnForSequenceClassification) for t, c in VARIANTS]

LENGTH = 23


@pytest.mark.parametrize("head, tno_type, causal", HEADS)
@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("left, right", [(7, 9), *exhaustive((1, 0), (0, 1), (13, 0), (0, 13), (0, 70), (70, 0))])
def test_padding_changes_nothing(head, tno_type, causal, post, left, right):
    position = "post" if post else "pre"
    model = seeded(head, tiny_config(tno_type, causal, norm_position=position))
    text = torch.randint(99, (LENGTH,))
    with torch.no_grad():
        bare, actual = model(text[None])[0], model(**padded(text, left, right))[0]
    if head is not TnnForSequenceClassification:
        actual = actual[:, left : left + LENGTH]
    assert relative_error(actual, bare) < 5e-6


def test_ragged_batch(variant):
    """Rows of different lengths, padded on different sides, in one batch."""
    model = seeded(TnnModel, tiny_config(*variant))
    texts = [torch.randint(99, (n,)) for n in (1, 5, 17, 30)]
    rows = [
        padded(text, 30 - len(text) if i % 2 else 0, 0 if i % 2 else 30 - len(text)) for i, text in enumerate(texts)
    ]
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        for row, text in enumerate(texts):
            real = hidden[row][batch["attention_mask"][row].bool()]
            assert relative_error(real, model(text[None]).last_hidden_state[0]) < 5e-6


def test_all_ones_is_no_mask(variant):
    model = seeded(TnnModel, tiny_config(*variant))
    input_ids = torch.randint(99, (2, LENGTH))
    for dtype in (torch.int64, torch.bool, torch.float32):
        masked = model(input_ids, attention_mask=torch.ones_like(input_ids, dtype=dtype))
        assert torch.equal(masked.last_hidden_state, model(input_ids).last_hidden_state)


def test_gradients_do_not_reach_padding(variant):
    model = seeded(TnnModel, tiny_config(*variant))
    inputs = padded(torch.randint(99, (LENGTH,)), 4, 6)
    embeddings = model.embed_tokens(inputs["input_ids"]).detach().requires_grad_()
    hidden = model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"]).last_hidden_state
    hidden[:, 4 : 4 + LENGTH].square().sum().backward()
    padding = embeddings.grad[0][inputs["attention_mask"][0] == 0]
    assert padding.abs().max() < 1e-5 * embeddings.grad.abs().max()


def test_row_without_real_tokens(variant):
    """Nothing sensible can come out; it must not be NaN, nor touch the other rows."""
    model = seeded(TnnForSequenceClassification, tiny_config(*variant))
    input_ids = torch.randint(99, (2, LENGTH))
    mask = torch.ones_like(input_ids)
    mask[1] = 0
    logits = model(input_ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    assert relative_error(logits[:1], model(input_ids[:1]).logits) < 5e-6
