"""Decoding states against the full product: random mixtures of steps, chunks and crops, operator by operator."""

import copy

import pytest
import torch

from helpers.models import relative_error, seeded, slow, tiny_config
from helpers.operators import advance
from modeling_tnn import TnnForCausalLM, numerics, recurrence, tno_modal, tno_rtf
from modeling_tnn.cache_tnn import TnnCacheLayer, max_crop
from modeling_tnn.history import SLACK, HistoryBuffer
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tools.comparing import bytes_per_sequence

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
    "exponential": {"tno_type": "exponential"},
    "modal": {"tno_type": "modal"},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 50},
    "hyena": {"tno_type": "hyena", "max_position_embeddings": 50},
}
# Others of the usual kinds have the same states.
ALIKE = ("rpe-learnable-decay", "rpe-decay-one", "rpe-slow-decay", "fd-long", "rtf-odd-length", "rtf-no-constraint")
EVERY_STATE = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ALIKE] + slow(*ALIKE))


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


@pytest.mark.parametrize("blocks", ["small blocks", *slow("usual blocks")], indirect=True)
@EVERY_STATE
def test_random_chunks_and_crops_equal_the_product(kind, blocks):
    """After prompts of several lengths: pieces of random length, and wrong continuations that are taken back.

    Rows change their places now and then, a copy is as good, and all of a text can be taken back. In float32 too.
    """
    operator = operator_of(kind)
    wrong, choice = 3 * random_input(200, operator, 3), torch.Generator().manual_seed(len(kind))
    for prompt, dtype in ((1, torch.float64), (7, torch.float64), (300, torch.float32), (800, torch.float64)):
        v, layer, position = random_input(prompt + 300, operator, 3), TnnCacheLayer(), prompt
        expected, tolerance = operator.double()(v), 1e-11 if dtype == torch.float64 else 2e-5
        operator.to(dtype)
        if prompt == 7:
            advance(layer, wrong[:, :20], operator)
            layer.crop(-20)
            assert layer.get_seq_length() == 0
        advance(layer, v[:, :prompt].to(dtype), operator)
        while position < v.shape[1]:
            length = [1, 1, 1, 2, 5, 40, 150][torch.randint(7, (), generator=choice)]
            if torch.rand((), generator=choice) < 0.3:
                mistaken = int(torch.randint(1, SLACK + 1, (), generator=choice))
                pieces = wrong[:, :mistaken].split(mistaken if torch.rand((), generator=choice) < 0.5 else 1, dim=1)
                for piece in pieces:
                    advance(layer, piece.to(dtype), operator)
                layer.crop(-mistaken)
            if length == 2:
                rows = torch.tensor([1, 2, 0])
                layer.reorder_cache(rows)
                v, expected, layer = v[rows], expected[rows], copy.deepcopy(layer)
            y = advance(layer, v[:, position : position + length].to(dtype), operator)
            assert relative_error(y, expected[:, position : position + length]) < tolerance, prompt
            position += y.shape[1]
            assert layer.get_seq_length() == position


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


@pytest.mark.parametrize("blocks", ["small blocks"], indirect=True)
@EVERY_STATE
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


def test_what_cannot_be_taken_back():
    """Of a prompt and after steps."""
    operator, layer = operator_of("rpe", decay=0.8), TnnCacheLayer()
    advance(layer, random_input(10, operator), operator)
    for steps, wrong, message in (
        (0, -11, "remove, at least -10 for this state of 10 tokens, got -11.* empty cache"),
        (300, -311, "`tokens_to_remove` must be .*, got -311"),
        (0, 3, "minus the number of tokens to"),
    ):
        for _ in range(steps):
            advance(layer, random_input(1, operator), operator)
        assert max_crop(layer) >= (SLACK if wrong != -11 else 10)
        with pytest.raises(ValueError, match=message):
            layer.crop(wrong)
    while count := max_crop(layer):
        layer.crop(-count)
    with pytest.raises(ValueError, match="at least 0 for this state of [1-9].* got -1"):
        layer.crop(-1)


def test_an_accelerator_looks_for_values_that_are_not_finite_now_and_then(monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    operator, layer = operator_of("rtf-no-constraint"), TnnCacheLayer()
    with torch.no_grad():
        operator.denominator.zero_()[:, 0] = -1.01  # a pole outside of the unit circle
    advance(layer, random_input(5, operator), operator)
    advance(layer, random_input(1, operator) / 0, operator)
    with pytest.raises(recurrence.DivergenceError, match="a pole of radius 1.01"):
        for _ in range(64):
            advance(layer, random_input(1, operator), operator)


@pytest.mark.parametrize("phase", [0.0, 0.83])
def test_no_token_does_the_work_of_a_block(phase, monkeypatch):
    """Each part of the next block has its token, in a short first block too, and a history moves when it is full."""
    operator = operator_of("rpe", decay=0.99)
    operator.refill_phase = phase
    looked, moved, position = {}, [], 0
    look_ahead, move = recurrence.FilterRecurrence.look_ahead, HistoryBuffer.move

    def spy(self, state, until, remaining):
        before = state.counters.ahead
        look_ahead(self, state, until, remaining)
        looked[position] = looked.get(position, 0) + state.counters.ahead - before

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


def test_a_first_call_that_failed_leaves_nothing(monkeypatch):
    operator, layer = operator_of("rpe"), TnnCacheLayer()
    v = random_input(20, operator)
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(type(operator), "coefficients", lambda *_: (_ for _ in ()).throw(MemoryError))
        advance(layer, v, operator)
    layer.crop(-1)
    parts = [advance(layer, v[:, t : t + 1], operator) for t in range(20)]
    assert relative_error(torch.cat(parts, dim=1), operator(v)) < 1e-12


@pytest.mark.parametrize("kind", ["rpe", "fd", "rtf", "modal"])
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


def unstable_model(radius):
    """Poles of this radius in the second layer."""
    model = seeded(TnnForCausalLM, tiny_config("rtf", rtf_constraint=None, max_position_embeddings=512))
    with torch.no_grad():
        model.model.layers[1].mixer.tno.denominator.zero_()
        model.model.layers[1].mixer.tno.denominator[:, 0] = -radius
    return model


def test_unstable_poles_are_named():
    """When a text is continued too far; a pass that is not continued does not mind them, nor do short texts."""
    model, ids = unstable_model(1.5), torch.arange(14).view(2, 7)
    with pytest.raises(ValueError, match=r"Layer 1, channel \d+: a pole of radius 1.500000 .*use_cache=False"):
        model.generate(ids, max_new_tokens=3)
    model.generate(ids, max_new_tokens=3, use_cache=False)
    model.train()(ids, labels=ids).loss.backward()
    assert torch.equal(model.eval()(ids).logits, model(ids, use_cache=False).logits)
    operator, layer = unstable_model(1.02).model.layers[1].mixer.tno, TnnCacheLayer()
    advance(layer, torch.ones(1, 100, operator.channels), operator)
    with pytest.raises(ValueError, match="Layer 1, channel 0: a pole of radius 1.020000 makes"):
        for _ in range(50):
            advance(layer, torch.ones(1, 1000, operator.channels), operator)
    found = [
        unstable_model(1.01).double().generate(ids, max_new_tokens=100, do_sample=False, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*found)
