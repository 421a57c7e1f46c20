"""The pooling of text classifiers: `classifier_pooling`."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, DynamicCache

from helpers.models import VARIANTS, padded, relative_error, seeded, tiny_config
from modeling_tnn import TnnForSequenceClassification
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification

POOLING = pytest.mark.parametrize("pooling", ["last", "mean"])
CAUSAL = pytest.mark.parametrize("causal", [True, False])

LENGTH = 23


def classifier(pooling, tno_type="rpe", causal=True) -> TnnForSequenceClassification:
    return seeded(TnnForSequenceClassification, tiny_config(tno_type, causal, classifier_pooling=pooling))


@CAUSAL
@POOLING
@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (0, 3), (2, 4)])
def test_pooled_are_the_real_tokens(pooling, causal, left, right):
    model = classifier(pooling, causal=causal)
    inputs = padded(torch.randint(99, (LENGTH,)), left, right)
    hidden = model.model(**inputs).last_hidden_state[0, left : left + LENGTH]
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    torch.testing.assert_close(model(**inputs).logits[0], model.classifier(pooled))


@POOLING
@pytest.mark.parametrize("tno_type, causal", VARIANTS)
@pytest.mark.parametrize("left, right", [(13, 0), (0, 13), (7, 9)])
def test_padding_changes_nothing(pooling, tno_type, causal, left, right):
    model = classifier(pooling, tno_type, causal)
    text = torch.randint(99, (LENGTH,))
    with torch.no_grad():
        assert relative_error(model(**padded(text, left, right)).logits, model(text[None]).logits) < 5e-6


@CAUSAL
def test_unless_set_it_follows_the_direction(causal):
    """Checkpoints from before the field answer as they did."""
    text = torch.randint(99, (1, LENGTH))
    as_before, named = classifier(None, causal=causal), classifier("last" if causal else "mean", causal=causal)
    assert torch.equal(as_before(text).logits, named(text).logits)
    other = classifier("mean" if causal else "last", causal=causal)
    assert relative_error(other(text).logits, named(text).logits) > 0.01


@CAUSAL
@POOLING
def test_it_is_saved(pooling, causal, tmp_path):
    model = classifier(pooling, causal=causal)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    text = torch.randint(99, (2, LENGTH))
    assert loaded.config.classifier_pooling == pooling
    assert torch.equal(loaded(text).logits, model(text).logits)


@POOLING
def test_pairs(pooling):
    model = seeded(TnnForSequencePairClassification, tiny_config(classifier_pooling=pooling))
    pairs = torch.randint(99, (1, 2, LENGTH))
    hidden = model.model(pairs[0]).last_hidden_state
    a, b = hidden[:, -1] if pooling == "last" else hidden.mean(1)
    torch.testing.assert_close(model(pairs).logits[0], model.classifier(torch.cat([a, b, a * b, a - b])))


def test_the_last_token_of_a_continued_text():
    model = classifier("last")
    text = torch.randint(99, (2, LENGTH))
    begun = model(text[:, :9], use_cache=True)
    continued = model(text[:, 9:], past_key_values=begun.past_key_values)
    assert relative_error(continued.logits, model(text).logits) < 5e-6


def test_the_mean_of_a_continued_text_is_refused():
    """The hidden states of what a cache holds are gone: the mean would be one of the new tokens alone."""
    model = classifier("mean")
    text = torch.randint(99, (2, LENGTH))
    cache = DynamicCache(config=model.config)
    begun = model(text[:, :9], past_key_values=cache)
    torch.testing.assert_close(begun.logits, model(text[:, :9]).logits)
    with pytest.raises(ValueError, match="`past_key_values` must be empty with classifier_pooling='mean'"):
        model(text[:, 9:], past_key_values=cache)
    assert cache.get_seq_length() == 9
