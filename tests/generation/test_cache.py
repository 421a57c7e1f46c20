"""What a cache holds and refuses, and both of its names: `cache`, transformers' from 5.24 on, and `past_key_values`.

Decoding with one is in `helpers/caches.py`.
"""

import inspect
import logging
import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from transformers import DynamicCache, GPT2Config, StaticCache, Trainer, TrainingArguments
from transformers.utils.logging import warning_once

from helpers.caches import TEXT, generate, model_of, passes
from helpers.hybrids import HYBRIDS
from helpers.models import lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.cache_tnn import CACHE, TnnCacheLayer
from modeling_tnn.history import HistoryBuffer
from modeling_tnn.tools.comparing import memory_per_sequence


def test_a_file_holds_what_was_written_and_no_other_memory():
    register = HistoryBuffer(torch.zeros(1, 1, 3), reach=10)
    register.append(torch.ones(1, 1, 1))
    assert register.buffer.shape[-1] > 4
    loaded = pickle.loads(pickle.dumps(register))
    assert torch.equal(loaded.buffer, torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]))
    loaded.append(torch.ones(1, 1, 1))
    assert torch.equal(loaded.last(2), torch.ones(1, 1, 2))
    model = seeded(TnnForCausalLM, tiny_config("rtf", hidden_size=64, rtf_state_size=60))
    assert len(pickle.dumps(model(TEXT[:1, :1]).past_key_values)) < 20_000 < model.num_parameters(), "no weights"


@pytest.mark.parametrize("name", ["rpe", "s4d", "hybrid"])
def test_an_offloaded_cache(name, monkeypatch):
    """States are used between `prefetch` and `offload` alone: elsewhere they have no tensors."""

    moved = []

    def offload(layer):
        moved.append(layer)
        layer.stored, without = layer.states, lambda one: SimpleNamespace(length=one.length, recurrence=one.recurrence)
        layer.states = {name: without(state) for name, state in layer.stored.items()}

    def prefetch(layer):
        layer.states = vars(layer).pop("stored", layer.states)

    monkeypatch.setattr(TnnCacheLayer, "offload", offload)
    monkeypatch.setattr(TnnCacheLayer, "prefetch", prefetch)
    for name_of_stream in ("torch.Stream", "torch.cuda.default_stream"):
        monkeypatch.setattr(name_of_stream, MagicMock())
    model = model_of(name)
    for kind in ("offloaded", "offloaded_static"):
        given = {"cache_implementation": kind, "disable_compile": True}
        assert torch.equal(generate(model, TEXT[:, :20], 20, **given), generate(model, TEXT[:, :20], 20)) and moved


@pytest.mark.parametrize("name", ["rpe", "hyena"])
def test_a_pass_that_was_interrupted(name, monkeypatch):
    """The first layers of the cache have seen the tokens, the last ones have not."""
    model = model_of(name)
    cache = model(TEXT[:, :20]).past_key_values
    monkeypatch.setattr(model.model.layers[1].mixer, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(TEXT[:, 20:22], past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="`past_key_values` is incomplete.* 20 to 22 tokens"):
        model(TEXT[:, 22:], past_key_values=cache)


def test_a_cache_of_another_configuration():
    cache = model_of("rpe")(TEXT[:, :20]).past_key_values
    for other in ({"decay": 0.8}, {"decay": 0.9, "hidden_act": "gelu"}, {"tno_type": "rtf"}):
        for past in (cache, pickle.loads(pickle.dumps(cache))):
            with pytest.raises(ValueError, match="another model"):
                lively_language_model(**other)(TEXT[:, 20:], past_key_values=past)


def test_what_is_no_cache_of_the_model():
    for past in ((), [(torch.ones(1), torch.ones(1))], "text"):
        with pytest.raises(ValueError, match="past_key_values"):
            model_of("rpe")(TEXT, past_key_values=past)
    for past in (DynamicCache(config=GPT2Config()), StaticCache(config=GPT2Config(), max_cache_len=9)):
        with pytest.raises(ValueError, match="DynamicCache\\(config=model.config\\), got .*Cache"):
            model_of("rpe")(TEXT, past_key_values=past)
    cache = model_of("hybrid")(TEXT).past_key_values
    for types in (["full_attention", "toeplitz"], ["sliding_attention"] * 2):
        with pytest.raises(ValueError, match="`past_key_values` must be a cache for TNNs"):
            model_of("sliding", layer_types=types)(TEXT, past_key_values=cache)


@torch.no_grad()
def test_a_window_that_forgets_says_so():
    cache = model_of("sliding")(TEXT).past_key_values
    with pytest.raises(RuntimeError, match="Call `activate_past_recording` before `crop`"):
        cache.crop(-1)


@torch.no_grad()
def test_eager_attention_decodes_after_padding():
    for fields in HYBRIDS.values():
        model, mask = model_of("rtf", **fields), torch.ones_like(TEXT)
        model.set_attn_implementation("eager")
        mask[0, :13] = 0
        expected = model(TEXT, attention_mask=mask, use_cache=False).logits
        found = passes(model, TEXT, [30] + [1] * 9 + [3, 1, 20, 2, 1, 94], mask)
        assert relative_error(found[mask.bool()], expected[mask.bool()]) < 1e-5


def test_memory_of_attention():
    """Of a window, as many tokens as it sees; of full attention, all."""
    heads = 2 * 2 * 10 * 8  # keys and values of 2 heads of 10 numbers in float64
    for kind, tokens in (("full_attention", 160), ("sliding_attention", 4)):
        model = model_of("attention", layer_types=[kind] * 2)
        assert memory_per_sequence(model(TEXT).past_key_values) == 2 * tokens * heads


@pytest.mark.slow  # the compiler breaks the graph at each layer
def test_a_compiled_pass_has_no_gradients_for_a_continued_cache():
    model = model_of("rpe")
    cache = model(TEXT[:, :20]).past_key_values
    logits = torch.compile(model, backend="aot_eager")(TEXT[:, 20:40], past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="continues a cache has no gradients"):
        logits.sum().backward()


NAMES = ["cache", "past_key_values"]
ROWS = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("name", NAMES)
def test_forward_takes_both_names(name):
    """Of heads and their body, whose outputs have the name of the installed transformers, and `generate`."""
    model, classifier = lively_language_model(decay=0.9), TnnForSequenceClassification(tiny_config(decay=0.9))
    for one, output in ((model, "logits"), (model.model, "last_hidden_state")):
        cache = one(ROWS[:, :7], use_cache=True)[CACHE]
        outputs = one(ROWS[:, 7:], use_cache=True, **{name: cache})
        assert outputs[CACHE] is cache and cache.get_seq_length() == 12
        assert relative_error(outputs[output], one(ROWS, use_cache=False)[output][:, 7:]) < 1e-12
    classifier.double().eval()
    cache = classifier(ROWS[:, :7], use_cache=True)[CACHE]
    assert relative_error(classifier(ROWS[:, 7:], **{name: cache}).logits, classifier(ROWS).logits) < 1e-12
    options = {"max_new_tokens": 9, "do_sample": False}
    with torch.no_grad():
        cache = model(ROWS[:, :7], use_cache=True)[CACHE]
    assert torch.equal(model.generate(ROWS, **{name: cache}, **options), model.generate(ROWS, **options))


def test_both_names_at_once_are_refused():
    model = lively_language_model()
    cache = model(ROWS, use_cache=True)[CACHE]
    given = dict.fromkeys(NAMES, cache)
    for call in (model, model.model):
        with pytest.raises(ValueError, match="two names of one argument"):
            call(ROWS, **given)
    with pytest.raises(ValueError, match="two names of one argument"):
        model.generate(ROWS, **given)
    assert model(ROWS, cache=None, past_key_values=cache)[CACHE] is cache
    assert {*NAMES} <= set(inspect.signature(TnnModel.forward).parameters), "tools of transformers look there"


def test_trainer_predicts_no_cache(tmp_path):
    """Trainer leaves the cache out of the predictions, by its name in the outputs."""
    model = TnnForSequenceClassification(tiny_config(decay=0.9, num_labels=3))
    arguments = TrainingArguments(tmp_path, report_to="none", use_cpu=True, use_cache=True)
    rows = [{"input_ids": row, "labels": 0} for row in ROWS]
    assert CACHE in model(ROWS)
    assert Trainer(model, arguments).predict(rows).predictions.shape == (2, 3)


@pytest.mark.filterwarnings("error:.*past_key_values")
@pytest.mark.parametrize("fields", [{"decay": 0.9}, HYBRIDS["full"]], ids=["toeplitz", "hybrid"])
def test_no_name_is_deprecated(fields, caplog):
    """Passes of ours use the name of the installed transformers, which warns of the other one."""
    model = lively_language_model(**fields)
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        model.generate(ROWS, max_new_tokens=3, do_sample=False)
        model.generate(ROWS, max_new_tokens=3, do_sample=False, cache=model(ROWS[:, :7], use_cache=True)[CACHE])
    assert "past_key_values" not in caplog.text
