"""The state after a prompt: what it keeps, what it can take back, and that decoding goes on as without a cache."""

import copy
import itertools
import pickle

import pytest
import torch
from transformers import DynamicCache

from helpers.cache_models import EVERY_MODEL, MODELS, WITH_HYBRIDS, model_of, states_of
from helpers.models import relative_error
from modeling_tnn import tno_modal, tno_rtf
from modeling_tnn.cache_tnn import TnnCacheLayer, max_crop, memory_per_sequence
from modeling_tnn.history import CHUNK_SLACK

BOUNDED = [name for name in MODELS if name != "rpe-no-decay"]
EVERY_BOUNDED = pytest.mark.parametrize("name", BOUNDED)
LONG = 7001


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A prompt of more than 100 tokens becomes a state in several pieces."""
    for module in (tno_rtf, tno_modal):
        monkeypatch.setattr(module, "PIECE", 100)
        monkeypatch.setattr(module, "LONG_PROMPT", 100)


def text_of(length, rows=2):
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(length))


def prefilled(model, text, **options):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, past_key_values=cache, **options)
    return cache


def held_tensors(state):
    held = [state.history and state.history.buffer, state.prompt and state.prompt.v, *state.tensors.values()]
    return [tensor for tensor in held if tensor is not None]


@EVERY_BOUNDED
def test_the_inputs_of_a_long_prompt_are_freed(name):
    model = model_of(name)
    cache = prefilled(model, text_of(LONG))
    for state in states_of(cache):
        assert state.prompt is None and held_tensors(state)
        for tensor in held_tensors(state):
            assert tensor.untyped_storage().nbytes() < state.history.buffer[..., 0].nbytes * LONG * 0.6
    assert cache.get_seq_length() == LONG


@EVERY_BOUNDED
def test_the_state_after_a_prompt_is_as_small_as_after_decoding(name):
    model = model_of(name)
    cache, twin = (prefilled(model, text_of(length)) for length in (LONG, 2 * LONG))
    size = memory_per_sequence(cache)
    assert size == memory_per_sequence(twin)
    with torch.no_grad():
        for token in text_of(3).split(1, dim=1):
            model(token, past_key_values=cache)
    states = states_of(cache)
    # A ring gives back the places for crops of a long chunk as soon as single tokens follow.
    spare = sum(CHUNK_SLACK * state.history.buffer[0, :, 0].nbytes for state in states if state.history.is_ring)
    assert size <= memory_per_sequence(cache) + spare
    for state, name in itertools.product(states, ("future", "ahead")):
        state.tensors.pop(name, None)
    assert spare or size == memory_per_sequence(cache)


@EVERY_MODEL
@pytest.mark.parametrize("length", [1, 99, 100, 101, 301, LONG])
def test_a_text_goes_on_after_a_prompt_of_any_length(name, length):
    model, text = model_of(name), text_of(length + 43)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        pieces = text.split([length, 1, 1, 40, 1], dim=1)
        logits = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)
    assert relative_error(logits, expected) < 1e-10


@WITH_HYBRIDS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts(name, side):
    model, text = model_of(name), text_of(301)
    mask = torch.ones_like(text)
    mask[0, slice(0, 207) if side == "left" else slice(94, 301)] = 0
    more = text_of(5)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    cache = prefilled(model, text, attention_mask=mask[:, :301])
    with torch.no_grad():
        expected = model(torch.cat([text, more], dim=1), attention_mask=mask, use_cache=False).logits[:, 301:]
        logits = [
            model(token, attention_mask=mask[:, : 302 + n], past_key_values=cache).logits
            for n, token in enumerate(more.split(1, dim=1))
        ]
    assert relative_error(torch.cat(logits, dim=1), expected) < 1e-10


@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [301, LONG])
def test_precision(name, dtype, length):
    model, text = model_of(name).to(dtype), text_of(length + 19)
    cache = prefilled(model, text[:, :length])
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, length:]
        logits = [model(token, past_key_values=cache).logits for token in text[:, length:].split(1, dim=1)]
    assert relative_error(torch.cat(logits, dim=1), expected) < (1e-4 if dtype is torch.float32 else 0.05)


@EVERY_MODEL
@pytest.mark.parametrize("length, removed", [(40, 40), (40, 39), (1000, 999), (LONG, CHUNK_SLACK)])
def test_a_prompt_is_taken_back(name, length, removed):
    """As after any chunk: all of a short one, the 1,024 newest tokens of a long one."""
    model, text, other = model_of(name), text_of(length), text_of(50)
    cache = prefilled(model, text)
    assert min(max_crop(layer) for layer in cache.layers) >= removed
    cache.crop(-removed)
    kept = length - removed
    assert cache.get_seq_length() == kept
    with torch.no_grad():
        logits = [model(piece, past_key_values=cache).logits for piece in other.split([1, 49], dim=1)]
        expected = model(torch.cat([text[:, :kept], other], dim=1), use_cache=False).logits[:, kept:]
    assert relative_error(torch.cat(logits, dim=1), expected) < 1e-10


@EVERY_BOUNDED
def test_more_of_a_long_prompt_cannot_be_taken_back(name):
    cache = prefilled(model_of(name), text_of(LONG))
    assert {max_crop(layer) for layer in cache.layers} == {CHUNK_SLACK}
    with pytest.raises(ValueError, match="at least -1024 for this state of 7001 tokens"):
        cache.crop(-CHUNK_SLACK - 1)
    assert cache.get_seq_length() == LONG


@WITH_HYBRIDS
def test_many_candidates_at_the_first_pass(name):
    """transformers appends the first candidates to the prompt, and takes back those that are wrong."""
    model, prompt = model_of(name), text_of(400, 1).repeat(1, 2)
    options = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(prompt, prompt_lookup_num_tokens=300, max_matching_ngram_size=1, **options)
    assert torch.equal(found, model.generate(prompt, use_cache=False, **options))


@WITH_HYBRIDS
def test_rows_beams_and_copies_of_a_prompt(name):
    model, text = model_of(name), text_of(340, 3)
    cache = prefilled(model, text[:, :301])
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 5]))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    rows = text[[2, 1]]
    with torch.no_grad():
        expected = model(rows, use_cache=False).logits[:, 301:]
        for past in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
            logits = [model(piece, past_key_values=past).logits for piece in rows[:, 301:].split([1, 38], dim=1)]
            assert relative_error(torch.cat(logits, dim=1), expected) < 1e-10
    options = {"max_new_tokens": 9, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(text, **options), model.generate(text, use_cache=False, **options))


@EVERY_MODEL
def test_a_prompt_with_gradients_keeps_its_inputs(name):
    """A training pass is seldom continued. Its cache can be saved, and it continues like any other."""
    model, text = model_of(name), text_of(340)
    cache = model(text[:, :301], use_cache=True).past_key_values
    assert all(state.prompt is not None and state.history is None for state in states_of(cache))
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, 301:]
        for past in (pickle.loads(pickle.dumps(cache)), cache):
            assert relative_error(model(text[:, 301:], past_key_values=past).logits, expected) < 1e-10


@WITH_HYBRIDS
@pytest.mark.parametrize("gradients", [False, True])
def test_a_prompt_of_inference_mode_goes_on_outside_it(name, gradients):
    model, text = model_of(name), text_of(340)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(text[:, :301], past_key_values=cache)
    with torch.set_grad_enabled(gradients):
        logits = [model(piece, past_key_values=cache).logits for piece in text[:, 301:].split([1, 1, 30, 7], dim=1)]
        expected = model(text, use_cache=False).logits[:, 301:]
    assert relative_error(torch.cat(logits, dim=1), expected) < 1e-10


@pytest.mark.parametrize("name", ["rpe", "rtf", "s4d", "modal"])
def test_inputs_that_have_faded_are_not_read(name):
    """Reading all inputs of a long prompt takes longer than a state needs."""
    operator = model_of(name).float().model.layers[1].mixer.tno
    with torch.no_grad():
        if name == "modal":
            operator.log_rate.fill_(-4)
        if name == "rtf":
            operator.slack.fill_(10)
        if name == "s4d":
            operator.log_step.zero_()
    v = torch.ones(2, LONG, operator.channels)
    v[:, :1000] = torch.nan
    layer = TnnCacheLayer()
    with torch.no_grad():
        layer.update(v, None, operator)
    state = layer.states["tno"]
    assert state.history.last(LONG).isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


def test_a_kernel_without_an_end_keeps_its_inputs_once():
    model = model_of("rpe-no-decay")
    cache = prefilled(model, text_of(LONG))
    for state in states_of(cache):
        assert state.history is None and state.prompt.v.untyped_storage().nbytes() == state.prompt.v.nbytes
    size = memory_per_sequence(cache)
    with torch.no_grad():
        model(text_of(1), past_key_values=cache)
    held = sum(state.history.buffer.nbytes // 2 for state in states_of(cache))
    assert all(state.prompt is None for state in states_of(cache)) and held < 1.13 * size


def test_a_long_text_is_scored_without_a_recurrence():
    """Poles outside the unit circle: the error comes when the text is continued, each time."""
    model = model_of("rtf", rtf_constraint=None)
    with torch.no_grad():
        model.model.layers[1].mixer.tno.denominator.zero_()
        model.model.layers[1].mixer.tno.denominator[:, 0] = -1.5
        text = text_of(120)
        outputs = model(text)
        assert torch.equal(outputs.logits, model(text, use_cache=False).logits)
        for _ in range(2):
            past = copy.deepcopy(outputs.past_key_values)
            with pytest.raises(ValueError, match="Layer 1, channel 0: a pole of radius 1.500000"):
                model(text[:, :1], past_key_values=past)


@pytest.mark.parametrize("name", ["rpe", "rtf", "s4d", "modal"])
def test_long_prompts_on_the_meta_device(name):
    """Shapes alone, as tools that count operations use them."""
    with torch.no_grad():
        logits = model_of(name).to("meta")(text_of(LONG).to("meta")).logits
    assert logits.shape == (2, LONG, 99)
