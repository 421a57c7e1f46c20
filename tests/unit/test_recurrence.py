"""Decoding states against the full product: random mixtures of steps, chunks and crops, operator by operator."""

import copy

import pytest
import torch

from helpers.caches import states_of
from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, recurrence, tno_modal, tno_rtf
from modeling_tnn.cache_tnn import TnnCacheLayer, bytes_per_sequence, max_crop, memory_per_sequence
from modeling_tnn.history import SLACK, HistoryBuffer
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rpe import taps_above

# Operators that need different ways to decode.
KINDS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-one-tap": {"tno_type": "rpe", "decay": 1e-20},
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.8, "learnable_decay": True},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None},
    "rpe-decay-one": {"tno_type": "rpe", "decay": 1},
    "rpe-medium-decay": {"tno_type": "rpe", "decay": 0.94},  # 583 taps: the history is a ring
    "rpe-slow-decay": {"tno_type": "rpe", "decay": 0.9999},
    "fd": {"tno_type": "fd", "fd_resolution": 32},
    "fd-long": {"tno_type": "fd", "fd_resolution": 8192},
    "rtf": {"tno_type": "rtf"},
    "rtf-odd-length": {"tno_type": "rtf", "max_position_embeddings": 63},
    "rtf-no-constraint": {"tno_type": "rtf", "rtf_constraint": None, "rtf_num_denominators": None},
    "s4d": {"tno_type": "s4d"},
    "modal": {"tno_type": "modal"},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 50},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["usual blocks", "small blocks"])
def blocks(request, monkeypatch):
    """Small blocks meet all their boundaries within a short text, and make the state after a prompt at once."""
    if request.param == "usual blocks":
        yield request.param
        return
    monkeypatch.setattr(recurrence, "SHORT_BLOCKS", (8, 8))
    monkeypatch.setattr(recurrence, "LONG_BLOCKS", (32, 4))
    monkeypatch.setattr(tno_modal, "BLOCK", 8)
    for module in (tno_modal, tno_rtf):
        monkeypatch.setattr(module, "PIECE", 16)
        monkeypatch.setattr(module, "LONG_PROMPT", 16)
    with torch.no_grad():
        yield request.param


def operator_of(kind, layer_idx=1, **fields):
    operator = seeded(build_tno, tiny_config(**KINDS[kind] | fields), layer_idx).double()
    torch.manual_seed(1)
    with torch.no_grad():
        operator.reset_parameters()
    return operator


def random_input(length, operator, rows=2):
    return torch.randn(
        rows, length, operator.channels, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )


def advance(layer, v, operator):
    return layer.update(v, None, operator)[0]


@EVERY_KIND
def test_steps_equal_the_product(kind, blocks):
    """After prompts of several lengths, and after all of one was taken back."""
    operator = operator_of(kind)
    for prompt in (1, 7, 300, 800) if blocks == "usual blocks" else (7, 300):
        v, layer = random_input(prompt + 150, operator), TnnCacheLayer()
        if prompt == 7:
            advance(layer, random_input(20, operator), operator)
            layer.crop(-20)
            assert layer.get_seq_length() == 0
        parts = [advance(layer, v[:, :prompt], operator)]
        parts += [advance(layer, v[:, t : t + 1], operator) for t in range(prompt, prompt + 150)]
        assert relative_error(torch.cat(parts, dim=1), operator(v)) < 1e-12
        assert layer.get_seq_length() == prompt + 150


@EVERY_KIND
def test_random_chunks_and_crops_equal_the_product(kind, blocks):
    """A text is fed in pieces of random length; now and then a wrong continuation is fed first and taken back."""
    operator = operator_of(kind)
    v, wrong = random_input(700, operator), 3 * random_input(200, operator)
    expected = operator(v)
    choice = torch.Generator().manual_seed(len(kind))
    layer, position = TnnCacheLayer(), 0
    while position < v.shape[1]:
        length = [1, 1, 1, 2, 5, 40, 150][torch.randint(7, (), generator=choice)]
        if position and torch.rand((), generator=choice) < 0.3:
            mistaken = int(torch.randint(1, SLACK + 1, (), generator=choice))
            pieces = wrong[:, :mistaken].split(mistaken if torch.rand((), generator=choice) < 0.5 else 1, dim=1)
            for piece in pieces:
                advance(layer, piece, operator)
            layer.crop(-mistaken)
        y = advance(layer, v[:, position : position + length], operator)
        assert relative_error(y, expected[:, position : position + length]) < 1e-11
        position += length
        assert layer.get_seq_length() == min(position, v.shape[1])


@pytest.mark.parametrize("order", [3, 16])
def test_blocks_of_many_texts(order):
    """In the middle of a block, which may be longer than the order, tokens are taken back and texts end."""
    operator = operator_of("rtf", rtf_state_size=order)
    v = random_input(150, operator, rows=2 * tno_rtf.BATCH)
    expected, layer, position = operator(v), TnnCacheLayer(), 0
    changes = {
        20: lambda: layer.crop(-3),
        40: lambda: layer.crop(-30),
        62: lambda: layer.batch_select_indices(torch.arange(tno_rtf.BATCH)),
        94: lambda: layer.batch_select_indices(torch.arange(1)),
        99: lambda: layer.batch_repeat_interleave(tno_rtf.BATCH),
    }
    while position < v.shape[1]:
        length = 5 if position in (9, 55) else 1
        rows = slice(1) if position >= 94 else slice(tno_rtf.BATCH if position >= 62 else None)
        piece = v[rows, position : position + length]
        if position >= 99:
            piece = piece.repeat(tno_rtf.BATCH, 1, 1)
        y = advance(layer, piece, operator)
        assert relative_error(y, expected[rows, position : position + length].expand_as(y)) < 1e-11
        position += length
        if position in changes:
            changes.pop(position)()
            position = layer.get_seq_length()
    assert not changes


@EVERY_KIND
def test_crops_across_the_start_of_a_block(kind, blocks):
    """Wrong tokens, a few more each time, end in the block or behind it."""
    operator = operator_of(kind)
    v, wrong = random_input(60, operator), 3 * random_input(14, operator)
    expected, layer = operator(v), TnnCacheLayer()
    advance(layer, v[:, :20], operator)
    for position in range(20, 60):
        count = 1 + (position * 5) % 13
        for token in wrong[:, :count].split(1, dim=1):
            advance(layer, token, operator)
        layer.crop(-count)
        y = advance(layer, v[:, position : position + 1], operator)
        assert relative_error(y, expected[:, position : position + 1]) < 1e-11


@pytest.mark.parametrize("phase", [0.0, 0.83])
def test_no_token_does_the_work_of_a_block(phase, monkeypatch):
    """Each part of the next block has its token, in a short first block too, and a history moves when it is full."""
    operator = operator_of("rpe", decay=0.99)
    operator.refill_phase = phase
    looked, moved, position = {}, [], 0
    look_ahead, move = recurrence.FilterRecurrence.look_ahead, HistoryBuffer.move

    def spy(self, state, until, remaining):
        before = state.counters.get("ahead", 0)
        look_ahead(self, state, until, remaining)
        looked[position] = looked.get(position, 0) + state.counters["ahead"] - before

    monkeypatch.setattr(recurrence.FilterRecurrence, "look_ahead", spy)
    monkeypatch.setattr(HistoryBuffer, "move", lambda self, *given: (moved.append(position), move(self, *given)))
    v, layer = random_input(1500, operator), TnnCacheLayer()
    advance(layer, v[:, :500], operator)
    for position in range(500, 1500):
        advance(layer, v[:, position : position + 1], operator)
    assert looked.pop(500) >= operator.channels  # the first block begins
    parts = layer.states["tno"].recurrence.first_block // 4
    assert max(looked.values()) <= -(-operator.channels // parts) + 1
    assert len(moved) <= 3, moved


@EVERY_KIND
def test_float32_state(kind):
    operator = operator_of(kind)
    v = random_input(300, operator)
    exact = operator(v)
    operator.float()
    layer = TnnCacheLayer()
    parts = [advance(layer, v[:, :7].float(), operator)]
    parts += [advance(layer, v[:, t : t + 1].float(), operator) for t in range(7, 300)]
    assert relative_error(torch.cat(parts, dim=1), exact) < 2e-5


def test_a_first_call_that_failed_leaves_nothing(monkeypatch):
    operator, layer = operator_of("rpe"), TnnCacheLayer()
    v = random_input(20, operator)
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(type(operator), "coefficients", lambda *_: (_ for _ in ()).throw(MemoryError))
        advance(layer, v, operator)
    layer.crop(-1)
    parts = [advance(layer, v[:, t : t + 1], operator) for t in range(20)]
    assert relative_error(torch.cat(parts, dim=1), operator(v)) < 1e-12


@EVERY_KIND
def test_crop_beyond_the_register(kind):
    operator, layer = operator_of(kind), TnnCacheLayer()
    advance(layer, random_input(10, operator), operator)
    with pytest.raises(ValueError, match="remove, at least -10 for this state of 10 tokens, got -11.* empty cache"):
        layer.crop(-11)
    for _ in range(300):
        advance(layer, random_input(1, operator), operator)
    assert max_crop(layer) >= SLACK
    for wrong, message in ((-311, "`tokens_to_remove` must be .*, got -311"), (3, "minus the number of tokens to")):
        with pytest.raises(ValueError, match=message):
            layer.crop(wrong)


@EVERY_KIND
def test_rows_are_independent(kind):
    """Reorder, repeat and select along the batch, of a cropped prompt too; a copy continues independently."""
    operator = operator_of(kind)
    v = random_input(90, operator, rows=3)
    expected = operator(v)
    layer = TnnCacheLayer()
    advance(layer, v[[2, 1, 0], :20], operator)
    layer.crop(-5)
    layer.reorder_cache(torch.tensor([2, 1, 0]))
    for t in range(15, 70):
        advance(layer, v[:, t : t + 1], operator)
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 5]))
    layer.offload()
    layer.prefetch()
    twin = copy.deepcopy(layer)
    for current in (layer, twin):
        y = torch.cat([advance(current, v[[2, 1], t : t + 1], operator) for t in range(70, 90)], dim=1)
        assert relative_error(y, expected[[2, 1], 70:]) < 1e-11


@pytest.mark.parametrize("kind", ["rpe", "fd", "rtf", "s4d", "modal"])
def test_state_does_not_grow(kind):
    operator = operator_of(kind)
    layer, sizes = TnnCacheLayer(), []
    for _ in range(1200):
        advance(layer, random_input(1, operator), operator)
        sizes.append(bytes_per_sequence(layer))
    assert max(sizes[600:]) <= max(sizes[:600])
    chunked = TnnCacheLayer()
    for _ in range(8):
        advance(chunked, random_input(1000, operator), operator)
    assert bytes_per_sequence(chunked) <= max(sizes) + 8 * operator.channels * 1200


def test_memory_counts_all_layers():
    model = seeded(TnnForCausalLM, tiny_config())
    cache = model(torch.arange(20).view(2, 10)).past_key_values
    inputs = [state.prompt.v for state in states_of(cache)]
    assert memory_per_sequence(cache) == sum(prompt.numel() * prompt.element_size() // 2 for prompt in inputs)
    cache = model(torch.arange(2).view(2, 1), past_key_values=cache).past_key_values
    buffers = [state.history.buffer for state in states_of(cache)]
    buffers += [tensor for state in states_of(cache) for tensor in state.tensors.values()]
    assert memory_per_sequence(cache) == sum(buffer.numel() * buffer.element_size() // 2 for buffer in buffers)


@pytest.mark.parametrize("decay, share", [(0.99, 2**-23), (0.99, 2**-52), (0.5, 2**-12)])
def test_number_of_taps_follows_from_the_decay(decay, share):
    taps = taps_above(decay, share)
    assert decay**taps <= share < decay ** (taps - 1)
    assert taps_above(1.0, share) is None


def test_register():
    register = HistoryBuffer(torch.zeros(1, 1, 0), reach=10)
    values = torch.arange(5000.0).view(1, 1, -1)
    position = 0
    for count in [1, 3, 500, 1, 2000, 1, 1, 7] + [1] * 400:
        register.append(values[..., position : position + count])
        position += count
        kept = min(position, 10 + SLACK)
        assert torch.equal(register.last(kept)[0, 0], values[0, 0, position - kept : position])
    assert register.buffer.shape[-1] < 10 + 4 * SLACK


@pytest.mark.parametrize("reach", [10, 600])
def test_a_history_after_a_crop(reach):
    """Also of a ring, whose newest values lie on both sides of its front now and then."""
    values, position = torch.arange(2100.0).view(1, 1, -1), 1000
    history = HistoryBuffer(values[..., :position], reach)
    while position < 2000:
        for _ in range(100):
            history.append(values[..., position : position + 1])
            position += 1
        history.drop(60)
        position -= 60
        assert torch.equal(history.last(reach)[0, 0], values[0, 0, position - reach : position])


def unstable_model(radius):
    """Poles of this radius in the second layer."""
    model = seeded(TnnForCausalLM, tiny_config("rtf", rtf_constraint=None, max_position_embeddings=512))
    with torch.no_grad():
        model.model.layers[1].mixer.tno.denominator.zero_()
        model.model.layers[1].mixer.tno.denominator[:, 0] = -radius
    return model


def test_slightly_unstable_poles_within_the_trained_length():
    """The transform does not mind a pole outside the unit circle; nor does the recurrence, as long as it is short."""
    model = unstable_model(1.01).double()
    prompt = torch.arange(7)[None]
    cached = model.generate(prompt, max_new_tokens=100, do_sample=False)
    assert torch.equal(cached, model.generate(prompt, max_new_tokens=100, do_sample=False, use_cache=False))


def test_unstable_poles_do_not_disturb_a_pass_that_is_not_continued():
    """Training and evaluation have a cache by default, too."""
    model, ids = unstable_model(1.5), torch.arange(14).view(2, 7)
    model.train()(ids, labels=ids).loss.backward()
    assert torch.equal(model.eval()(ids).logits, model(ids, use_cache=False).logits)


def test_unstable_poles_are_named():
    model = unstable_model(1.5)
    with pytest.raises(ValueError, match=r"Layer 1, channel \d+: a pole of radius 1.500000 .*use_cache=False"):
        model.generate(torch.arange(7)[None], max_new_tokens=3)
    model.generate(torch.arange(7)[None], max_new_tokens=3, use_cache=False)


def test_divergence_beyond_the_trained_length_is_named():
    operator = unstable_model(1.02).model.layers[1].mixer.tno
    layer = TnnCacheLayer()
    advance(layer, torch.ones(1, 100, operator.channels), operator)
    with pytest.raises(ValueError, match="Layer 1, channel 0: a pole of radius 1.020000 makes"):
        for _ in range(50):
            advance(layer, torch.ones(1, 1000, operator.channels), operator)


def test_training_with_a_cache_has_its_gradients():
    model = seeded(TnnForCausalLM, tiny_config()).train()
    ids = torch.arange(12).view(2, 6)
    gradients = []
    for use_cache in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, labels=ids, use_cache=use_cache).loss.backward()
        gradients.append(model.model.layers[0].mixer.tno.rpe.in_proj.weight.grad.clone())
    assert torch.equal(*gradients)


def test_bidirectional_models_do_not_generate():
    with pytest.raises(ValueError, match="`causal` must be True for a recurrence, got False"):
        build_tno(tiny_config("rpe", False)).recurrence()
