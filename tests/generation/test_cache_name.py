"""The cache by both of its names: `cache`, that of transformers from 5.24 on, and `past_key_values`."""

import inspect
import logging

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.logging import warning_once

from helpers.hybrids import HYBRIDS
from helpers.models import lively_language_model, relative_error, tiny_config
from modeling_tnn import TnnForSequenceClassification, TnnModel
from modeling_tnn.cache_tnn import CACHE

NAMES = ["cache", "past_key_values"]
TEXT = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("name", NAMES)
def test_forward_takes_both_names(name):
    """Of heads and their body, whose outputs have the name of the installed transformers, and `generate`."""
    model, classifier = lively_language_model(decay=0.9), TnnForSequenceClassification(tiny_config(decay=0.9))
    for one, output in ((model, "logits"), (model.model, "last_hidden_state")):
        cache = one(TEXT[:, :7], use_cache=True)[CACHE]
        outputs = one(TEXT[:, 7:], use_cache=True, **{name: cache})
        assert outputs[CACHE] is cache and cache.get_seq_length() == 12
        assert relative_error(outputs[output], one(TEXT, use_cache=False)[output][:, 7:]) < 1e-12
    classifier.double().eval()
    cache = classifier(TEXT[:, :7], use_cache=True)[CACHE]
    assert relative_error(classifier(TEXT[:, 7:], **{name: cache}).logits, classifier(TEXT).logits) < 1e-12
    options = {"max_new_tokens": 9, "do_sample": False}
    with torch.no_grad():
        cache = model(TEXT[:, :7], use_cache=True)[CACHE]
    assert torch.equal(model.generate(TEXT, **{name: cache}, **options), model.generate(TEXT, **options))


def test_both_names_at_once_are_refused():
    model = lively_language_model()
    cache = model(TEXT, use_cache=True)[CACHE]
    given = dict.fromkeys(NAMES, cache)
    for call in (model, model.model):
        with pytest.raises(ValueError, match="two names of one argument"):
            call(TEXT, **given)
    with pytest.raises(ValueError, match="two names of one argument"):
        model.generate(TEXT, **given)
    assert model(TEXT, cache=None, past_key_values=cache)[CACHE] is cache
    assert {*NAMES} <= set(inspect.signature(TnnModel.forward).parameters), "tools of transformers look there"


def test_trainer_predicts_no_cache(tmp_path):
    """Trainer leaves the cache out of the predictions, by its name in the outputs."""
    model = TnnForSequenceClassification(tiny_config(decay=0.9, num_labels=3))
    arguments = TrainingArguments(tmp_path, report_to="none", use_cpu=True, use_cache=True)
    rows = [{"input_ids": row, "labels": 0} for row in TEXT]
    assert CACHE in model(TEXT)
    assert Trainer(model, arguments).predict(rows).predictions.shape == (2, 3)


@pytest.mark.filterwarnings("error:.*past_key_values")
@pytest.mark.parametrize("fields", [{"decay": 0.9}, HYBRIDS["full"]], ids=["toeplitz", "hybrid"])
def test_no_name_is_deprecated(fields, caplog):
    """Passes of ours use the name of the installed transformers, which warns of the other one."""
    model = lively_language_model(**fields)
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        model.generate(TEXT, max_new_tokens=3, do_sample=False)
        model.generate(TEXT, max_new_tokens=3, do_sample=False, cache=model(TEXT[:, :7], use_cache=True)[CACHE])
    assert "past_key_values" not in caplog.text
