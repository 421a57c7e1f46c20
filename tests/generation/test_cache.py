"""Caches on disk, in copies and in other processes; the model they belong to; objects that are not caches of a TNN."""

import copy
import io
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from helpers.cache_models import TEXT, WITH_HYBRIDS, model_of
from helpers.models import lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM
from modeling_tnn.cache_tnn import memory_per_sequence
from modeling_tnn.history import HistoryBuffer


def saved(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return file


WAYS = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "twice": lambda cache: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(cache)))),
    "torch": lambda cache: torch.load(saved(cache), weights_only=False),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("other", [{"decay": 0.8}, {"decay": 0.9, "hidden_act": "gelu"}, {"tno_type": "rtf"}])
def test_a_cache_of_another_configuration(other):
    cache = model_of("rpe")(TEXT[:, :20]).past_key_values
    for past in (cache, pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ValueError, match="another model"):
            lively_language_model(**other)(TEXT[:, 20:], past_key_values=past)


@WITH_HYBRIDS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 5])
def test_a_cache_that_was_saved_goes_on_with_a_copy_of_the_model(name, way, steps):
    model = model_of(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for chunk in TEXT[:, : 40 + steps].split([40] + [1] * steps, dim=1):
            model(chunk, past_key_values=cache)
        loaded = WAYS[way](cache)
        assert loaded.get_seq_length() == 40 + steps
        twin = copy.deepcopy(model)
        expected = model(TEXT, use_cache=False).logits[:, 40 + steps :]
        for reader, past in ((twin, loaded), (model, cache)):
            parts = [
                reader(chunk, past_key_values=past).logits
                for chunk in TEXT[:, 40 + steps :].split([1, 1, 30, 88 - steps], dim=1)
            ]
            assert relative_error(torch.cat(parts, dim=1), expected) < 1e-10


def reset_empties_attention():
    """Whether transformers' own layer is empty after `reset`. That of 5.17 still has as many keys, all zero."""
    layer, key = DynamicLayer(), torch.ones(1, 1, 3, 1)
    layer.update(key, key)
    layer.reset()
    return layer.get_seq_length() == 0


@WITH_HYBRIDS
@pytest.mark.parametrize("steps", [0, 5])
def test_a_saved_cache_has_all_its_methods(name, steps):
    model = model_of(name)
    with torch.no_grad():
        cache = model(TEXT[:, :40]).past_key_values
        for t in range(40, 40 + steps):
            model(TEXT[:, t : t + 1], past_key_values=cache)
        cache = pickle.loads(pickle.dumps(cache))
        assert len(cache) == 2 and cache.get_seq_length() == 40 + steps and cache.is_croppable
        assert memory_per_sequence(cache) > 0
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        text = TEXT.flip(0)
        logits = model(text[:, 38 + steps :], past_key_values=cache).logits
        assert relative_error(logits, model(text, use_cache=False).logits[:, 38 + steps :]) < 1e-10
        cache.reset()
        assert cache.get_seq_length() == 0
        if name == "hybrid" and not reset_empties_attention():
            with pytest.raises(ValueError, match="`past_key_values` is incomplete.* Start with an empty cache"):
                model(TEXT, past_key_values=cache)
            return
        assert relative_error(model(TEXT, past_key_values=cache).logits, model(TEXT).logits) < 1e-12


def test_a_file_holds_what_was_written_and_no_other_memory():
    register = HistoryBuffer(torch.zeros(1, 1, 3), reach=10)
    register.append(torch.ones(1, 1, 1))
    assert register.buffer.shape[-1] > 4
    loaded = pickle.loads(pickle.dumps(register))
    assert torch.equal(loaded.buffer, torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]))
    loaded.append(torch.ones(1, 1, 1))
    assert torch.equal(loaded.last(2), torch.ones(1, 1, 2))


def test_a_file_holds_no_weights():
    """A state of a few thousand bytes does not carry its operator."""
    model = seeded(TnnForCausalLM, tiny_config("rtf", hidden_size=64, rtf_state_size=60))
    cache = model(TEXT[:1, :1]).past_key_values
    assert len(pickle.dumps(cache)) < 20_000 < model.num_parameters()


@WITH_HYBRIDS
def test_generate_from_a_saved_prompt(name):
    model, prompt = model_of(name), TEXT[:, :20]
    cache = model(prompt[:, :12]).past_key_values
    loaded = pickle.loads(pickle.dumps(cache))
    options = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(
        copy.deepcopy(model).generate(prompt, past_key_values=loaded, **options), model.generate(prompt, **options)
    )


@WITH_HYBRIDS
def test_an_empty_cache_decodes_with_the_present_weights(name):
    """Nothing that the recurrences of an earlier cache computed from the weights is used again."""
    model, options = model_of(name), {"max_new_tokens": 30, "do_sample": False}
    model.generate(TEXT[:, :20], past_key_values=DynamicCache(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected = model.generate(TEXT[:, :20], use_cache=False, **options)
    for empty in (DynamicCache(), DynamicCache(config=model.config)):
        assert torch.equal(model.generate(TEXT[:, :20], past_key_values=empty, **options), expected)


def test_inference_mode():
    """Tensors of inference mode count no writes."""
    with torch.inference_mode():
        model = model_of("rpe")
        cache = model(TEXT[:, :20]).past_key_values
        for t in range(20, 25):
            logits = model(TEXT[:, t : t + 1], past_key_values=cache).logits
        loaded = pickle.loads(pickle.dumps(cache))
        assert relative_error(logits[:, -1], model(TEXT[:, :25]).logits[:, -1]) < 1e-10
        expected = model(TEXT).logits[:, 25:]
        assert relative_error(model(TEXT[:, 25:], past_key_values=loaded).logits, expected) < 1e-10


def test_a_pass_that_was_interrupted(monkeypatch):
    """The first layers of the cache have seen the tokens, the last ones have not."""
    model = model_of("rpe")
    cache = model(TEXT[:, :20]).past_key_values
    monkeypatch.setattr(model.model.layers[1].mixer, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(TEXT[:, 20:22], past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="`past_key_values` is incomplete.* 20 to 22 tokens"):
        model(TEXT[:, 22:], past_key_values=cache)


@WITH_HYBRIDS
def test_an_empty_cache_without_a_configuration_is_filled(name):
    model, cache = model_of(name), DynamicCache()
    assert len(cache) == 0 and cache.get_seq_length() == 0
    parts = [model(chunk, past_key_values=cache).logits for chunk in TEXT.split([9, 1, 150], dim=1)]
    assert len(cache) == 2 and cache.get_seq_length() == 160
    assert relative_error(torch.cat(parts, dim=1), model(TEXT).logits) < 1e-10
    options = {"max_new_tokens": 9, "do_sample": False}
    generated = model.generate(TEXT, past_key_values=DynamicCache(), **options)
    assert torch.equal(generated, model.generate(TEXT, **options))


@pytest.mark.parametrize("past", [(), [(torch.ones(1), torch.ones(1))], "text"], ids=str)
def test_what_is_no_cache(past):
    with pytest.raises(ValueError, match="past_key_values"):
        model_of("rpe")(TEXT, past_key_values=past)
