"""Training through a cache: gradients of a continued text, with what the cache holds as a constant."""

import copy

import pytest
import torch
from transformers import DynamicCache

from helpers.cache_models import EVERY_MODEL, MODELS, TEXT, WITH_HYBRIDS, model_of
from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.tno_auto import build_tno

# The kernels that are decoded from past inputs: with these detached, the whole product is the oracle.
FROM_INPUTS = [name for name in MODELS if name not in ("rtf", "s4d", "modal")]


def operator_of(name):
    operator = seeded(build_tno, tiny_config(**MODELS[name]), 1).double()
    with torch.no_grad():
        operator.reset_parameters()
    return operator


def randomly(operator, *shape):
    return torch.randn(*shape, operator.channels, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def gradients(y, inputs):
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    return torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, materialize_grads=True)


def close(actual, expected, tolerance=1e-10):
    return all(relative_error(a, e) < tolerance for a, e in zip(actual, expected, strict=True))


def started_layer(operator, v, steps):
    """A state after `v` `(B, L, D)`, the last `steps` tokens one by one."""
    layer = TnnCacheLayer()
    with torch.no_grad():
        layer.update(v[:, : v.shape[1] - steps], None, operator)
        for t in range(v.shape[1] - steps, v.shape[1]):
            layer.update(v[:, t : t + 1], None, operator)
    return layer


@pytest.mark.parametrize("name", FROM_INPUTS)
@pytest.mark.parametrize("past, steps, new", [(1, 0, 1), (7, 0, 40), (150, 3, 1), (150, 140, 33)])
def test_gradients_are_those_of_the_product_with_its_past_detached(name, past, steps, new):
    operator = operator_of(name)
    v = randomly(operator, 2, past + new)
    layer, now = started_layer(operator, v[:, :past], steps), v[:, past:].clone().requires_grad_()
    inputs = [now, *operator.parameters()]
    y = layer.update(now, None, operator)[0]
    expected = operator(torch.cat([v[:, :past], now], dim=1))[:, past:]
    assert relative_error(y, expected) < 1e-11
    assert close(gradients(y, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("past, steps, new", [(7, 0, 40), (150, 3, 1), (150, 140, 33), (3, 1, 200)])
def test_gradients_of_rtf_are_those_of_its_recurrence(past, steps, new):
    operator = operator_of("rtf")
    v = randomly(operator, 2, past + new)
    layer, now = started_layer(operator, v[:, :past], steps), v[:, past:].clone().requires_grad_()
    form = operator.companion_form()
    order = form.denominator.shape[1]
    twin = copy.deepcopy(layer)
    y = layer.update(now, None, operator)[0]
    if twin.prefill is not None:
        with torch.no_grad():
            twin.recurrence.start(twin, twin.prefill)
    w, outputs = list(twin.history.last(order).unbind(-1)), []  # (B, D) each
    for u in now.unbind(1):
        recent = torch.stack(w[: -order - 1 : -1], dim=-1)  # (B, D, N): w_{t-1} .. w_{t-N}
        outputs.append(form.direct * u + (form.numerator * recent).sum(-1))
        w.append(u - (form.denominator * recent).sum(-1))
    expected = torch.stack(outputs, dim=1)
    inputs = [now, *operator.parameters()]
    assert relative_error(y, expected) < 1e-11
    assert close(gradients(y, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("name", ["modal", "s4d"])
@pytest.mark.parametrize("past, steps, new", [(7, 0, 40), (20, 5, 1), (60, 3, 30)])
def test_gradients_of_modes_before_their_memory_covers_inputs(name, past, steps, new):
    """Until then they are decoded from their inputs like any other kernel."""
    test_gradients_are_those_of_the_product_with_its_past_detached(name, past, steps, new)


@pytest.mark.parametrize("name", ["modal", "s4d"])
def test_gradients_of_modes_are_those_of_their_recurrence(name):
    """By hand: y_t from the inputs within the window and a state of all older ones, held constant."""
    operator = operator_of(name)
    past, new, window = 200, 20, operator.window
    v = randomly(operator, 2, past + new)
    layer, now = started_layer(operator, v[:, :past], 5), v[:, past:].clone().requires_grad_()
    covered = layer.counters["covered"]
    assert covered > 0

    def powers(exponents):  # (D, Q, M), also if all channels share the poles
        found = operator.powers(exponents)
        return found.expand(operator.channels, *found.shape[-2:])

    with torch.no_grad():
        ages = powers(torch.arange(covered).flip(0))  # (D, Q, C)
        memory = torch.einsum("dqc,bcd->bdq", ages, v[:, :covered].to(ages.dtype))
    recent = torch.cat([v[:, covered:past], now], dim=1)
    near = operator(recent)[:, past - covered :]
    age = torch.arange(past, past + new) - covered + 1 - window
    far = torch.einsum("bdq,dq,dqt->btd", memory, operator.complex_residues(), powers(age)).real
    y = layer.update(now, None, operator)[0]
    inputs = [now, *operator.parameters()]
    assert relative_error(y, near + far) < 1e-11
    assert close(gradients(y, inputs), gradients(near + far, inputs))


@EVERY_MODEL
def test_every_parameter_learns_from_a_continued_text(name):
    """Truncated back-propagation through time: a step of the optimizer after each chunk, with its state kept."""
    model = model_of(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cache = None
    for chunk in TEXT.split([40, 40, 1, 79], dim=1):
        optimizer.zero_grad()
        outputs = model(chunk, past_key_values=cache, use_cache=True)
        outputs.logits.logsumexp(-1).mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert model.model.layers[1].gtu.v_proj.weight.grad.abs().max() > 0
        kernel = [p for p in model.model.layers[0].gtu.tno.parameters() if p.grad.abs().max() > 0]
        assert kernel
        cache = outputs.past_key_values
        optimizer.step()


@pytest.mark.parametrize("name", FROM_INPUTS)
def test_new_weights_decode_as_the_whole_product_of_the_kept_inputs(name):
    """While training: a step in the middle of a block, then the next token with the new kernel."""
    operator = operator_of(name)
    v = randomly(operator, 2, 60)
    layer = started_layer(operator, v[:, :50], 20)
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.mul_(1.1)
    layer.renew()
    y = torch.cat([layer.update(v[:, t : t + 1], None, operator)[0] for t in range(50, 60)], dim=1)
    assert relative_error(y, operator(v)[:, 50:]) < 1e-9


def test_taking_back_does_not_disturb_a_backward_pass():
    operator = operator_of("rpe")
    v, other = randomly(operator, 2, 60), randomly(operator, 2, 30)
    layer, now = started_layer(operator, v[:, :50], 4), v[:, 50:].clone().requires_grad_()
    y = layer.update(now, None, operator)[0]
    layer.crop(-30)
    with torch.no_grad():
        layer.update(other, None, operator)
    inputs = [now, *operator.parameters()]
    expected = operator(torch.cat([v[:, :50], now], dim=1))[:, 50:]
    assert close(gradients(y, inputs), gradients(expected, inputs))


@WITH_HYBRIDS
def test_the_same_logits_with_gradients_and_without(name):
    model, caches = model_of(name), [DynamicCache(), DynamicCache()]
    for chunk in TEXT.split([30] + [1] * 40 + [90], dim=1):
        with torch.no_grad():
            expected = model(chunk, past_key_values=caches[0]).logits
        logits = model(chunk, past_key_values=caches[1]).logits
        assert logits.requires_grad
        assert relative_error(logits, expected) < 1e-12


def test_second_derivatives_of_a_continuation():
    operator = seeded(build_tno, tiny_config(decay=0.9, tno_implementation="eager"), 1).double()
    v = randomly(operator, 2, 20)
    layer, now = started_layer(operator, v[:, :15], 3), v[:, 15:].clone().requires_grad_()
    taps = list(operator.parameters())
    y = layer.update(now, None, operator)[0]
    expected = operator(torch.cat([v[:, :15], now], dim=1))[:, 15:]
    penalties = []
    for outputs in (y, expected):
        gradient = torch.autograd.grad(outputs.square().sum(), now, create_graph=True)[0]
        penalties.append(torch.autograd.grad(gradient.square().sum(), taps, allow_unused=True, materialize_grads=True))
    assert close(*penalties)
