"""The state after a long prompt: what it holds, and what is not read for it; decoding is in `helpers/caches.py`."""

import pickle

import pytest
import torch

from helpers.caches import cache_of, model_of, passes, states_of, text_of
from helpers.models import relative_error, slow
from modeling_tnn import tno_modal, tno_rtf
from modeling_tnn.cache_tnn import TnnCacheLayer, max_crop
from modeling_tnn.history import CHUNK_SLACK
from modeling_tnn.tno import continue_sequence
from modeling_tnn.tools.comparing import memory_per_sequence

EVERY_STATE = pytest.mark.parametrize("name", ["rpe", "rtf", "modal", *slow("fd", "s4d", "explicit")])
LONG = 7001


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A prompt of more than 100 tokens becomes a state in several pieces."""
    for module in (tno_rtf, tno_modal):
        monkeypatch.setattr(module, "PIECE", 100)
        monkeypatch.setattr(module, "LONG_PROMPT", 100)


def held_tensors(state):
    held = [state.history and state.history.buffer, state.prompt and state.prompt.v, *state.tensors.values()]
    return [tensor for tensor in held if tensor is not None]


@EVERY_STATE
@torch.no_grad()
def test_the_state_after_a_long_prompt_is_that_of_decoding(name):
    """Its inputs are freed, its size is that of a longer one; the 1,024 newest tokens can be taken back, no more."""
    model, text, other = model_of(name), text_of(LONG), text_of(50)
    cache, twin = (cache_of(model, text_of(length)) for length in (LONG, 2 * LONG))
    states, size = states_of(cache), memory_per_sequence(cache)
    for state in states:
        assert state.prompt is None and held_tensors(state)
        for tensor in held_tensors(state):
            assert tensor.untyped_storage().nbytes() < state.history.buffer[..., 0].nbytes * LONG * 0.6
    assert size == memory_per_sequence(twin) and cache.get_seq_length() == LONG
    assert {max_crop(layer) for layer in cache.layers} == {CHUNK_SLACK}
    with pytest.raises(ValueError, match="at least -1024 for this state of 7001 tokens"):
        cache.crop(-CHUNK_SLACK - 1)
    cache.crop(-CHUNK_SLACK)
    kept = LONG - CHUNK_SLACK
    whole = torch.cat([text[:, :kept], other], dim=1)
    expected = model(whole, use_cache=False).logits[:, kept:]
    assert relative_error(passes(model, whole, [1, 49], cache=cache), expected) < 1e-10
    for token in text_of(3).split(1, dim=1):
        model(token, past_key_values=twin)
    # The places for crops of a long prompt go as soon as single tokens follow.
    spare = sum(CHUNK_SLACK * state.history.buffer[0, :, 0].nbytes for state in states_of(twin))
    assert 0.4 * spare < size - memory_per_sequence(twin) <= spare


@pytest.mark.parametrize("name", ["rpe", "rtf", *slow("rpe-no-decay", "s4d", "modal", "hyena")])
@torch.no_grad()
def test_pieces_of_a_prompt(name):
    """Each is read by itself, with padding before it, after it and in it, in float32 too."""
    model, text = model_of(name), text_of(LONG + 19)
    for length in (99, 100, 101, 301):
        part = text[:, : length + 19]
        for padding in (slice(0), slice(0, length // 2), slice(length // 2, length)):
            mask = torch.ones_like(part)
            mask[0, padding] = 0
            expected = model(part, attention_mask=mask, use_cache=False).logits
            found = passes(model, part, [length, 1, 18], mask)
            assert relative_error(found[mask.bool()], expected[mask.bool()]) < 1e-10
    if name != "hyena":
        model = model.float()
        found = passes(model, text, [LONG, 1, 1, 17])
        assert relative_error(found[:, LONG:], model(text, use_cache=False).logits[:, LONG:]) < 1e-4


@pytest.mark.parametrize("name", ["rpe", "rtf", "modal"])
def test_a_prompt_with_gradients_keeps_its_inputs(name):
    """A training pass is seldom continued. Its cache can be saved, and it continues like any other."""
    model, text = model_of(name), text_of(340)
    cache = model(text[:, :301], use_cache=True).past_key_values
    assert all(state.prompt is not None and state.history is None for state in states_of(cache))
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, 301:]
        for past in (pickle.loads(pickle.dumps(cache)), cache):
            assert relative_error(model(text[:, 301:], past_key_values=past).logits, expected) < 1e-10


@pytest.mark.parametrize("name", ["rpe", "modal", *slow("rtf", "s4d")])
@torch.no_grad()
def test_inputs_that_have_faded_are_not_read(name):
    """Reading all inputs of a long prompt takes longer than a state needs. On the meta device shapes are enough."""
    operator = model_of(name).float().model.layers[1].mixer.tno
    if name == "modal":
        operator.log_rate.fill_(-4)
    if name == "rtf":
        operator.slack.fill_(10)
    if name == "s4d":
        operator.log_step.zero_()
    v = torch.ones(2, LONG, operator.channels)
    v[:, :1000] = torch.nan
    layer = TnnCacheLayer()
    continue_sequence(operator, layer, v)
    state = layer.states["tno"]
    assert state.history.last(LONG).isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    assert model_of(name).to("meta")(text_of(LONG).to("meta")).logits.shape == (2, LONG, 99)


@torch.no_grad()
def test_a_kernel_without_an_end_keeps_its_inputs_once():
    model = model_of("rpe-no-decay")
    cache = cache_of(model, text_of(LONG))
    for state in states_of(cache):
        assert state.history is None and state.prompt.v.untyped_storage().nbytes() == state.prompt.v.nbytes
    size = memory_per_sequence(cache)
    model(text_of(1), past_key_values=cache)
    held = sum(state.history.buffer.nbytes // 2 for state in states_of(cache))
    assert all(state.prompt is None for state in states_of(cache)) and held < 1.13 * size
