"""Derivatives of derivatives, and torch.func, through operators and models: those of `implementation="eager"`.

Compared in float64. `helpers/products.py` has those of the product.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy, silu

from helpers.models import (
    BIDIRECTIONAL,
    CAUSAL,
    checkpoint_activations,
    random,
    relative_error,
    seeded,
    slow,
    tiny_config,
)
from helpers.products import assert_close, mask_of
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.toeplitz_fused import Gate

WAYS = ("fused", "eager")
OPERATORS = [(name, causal, {}) for causal in (True, False) for name in (CAUSAL if causal else BIDIRECTIONAL)]
OPERATORS += [
    ("rpe", True, {"decay": 0.9, "learnable_decay": True}),
    ("rpe", False, {"rpe_window": 2}),
    ("rtf", True, {"rtf_constraint": None, "rtf_num_denominators": 1}),
    ("rtf", False, {"rtf_constraint": None, "rtf_num_denominators": None}),
    ("rpe", False, {"spatial_dims": 2}),
]
# One kernel of the product, two products, and a custom function of the taps.
MODELS = [("rpe", True, {}), ("ski", False, {}), ("rtf", True, {})]


def operator_name(operator) -> str:
    name, causal, fields = operator
    return "-".join([name, "causal" if causal else "bidirectional", *fields])


every_operator = pytest.mark.parametrize("operator", OPERATORS[::2] + slow(*zip(OPERATORS[1::2])), ids=operator_name)
models = pytest.mark.parametrize("operator", MODELS, ids=operator_name)


def operator_and_input(operator, product):
    tno_type, causal, fields = operator
    config = tiny_config(tno_type, causal, hidden_size=4, tno_implementation=product, **fields)
    torch.manual_seed(0)
    tno = build_tno(config, 0).double()
    for parameter in tno.parameters():
        torch.nn.init.uniform_(parameter, -0.3, 0.3)
    return tno, random(2, 25 if "spatial_dims" in fields else 17, 8)


def language_model(operator, product):
    tno_type, causal, fields = operator
    fields = {"hidden_size": 8, "vocab_size": 23, "hidden_dropout_prob": 0.0, "tno_implementation": product} | fields
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(tno_type, causal, **fields)).double()


@every_operator
def test_operators_under_torch_func(operator):
    found = []
    for product in WAYS:
        tno, v = operator_and_input(operator, product)
        v, p = v.detach(), {name: p.detach() for name, p in tno.named_parameters()}
        gate, several, direction = (
            v.cos(),
            torch.stack([v, v.sin(), v + 1]),
            ({n: x.cos() for n, x in p.items()}, v.cos()),
        )

        def mixed(p, v, tno=tno, gate=gate):
            return functional_call(tno, p, (v, Gate(gate, silu)))

        def loss(p, v, mixed=mixed):
            return mixed(p, v).square().sum()

        def penalty(p, v, loss=loss):
            return grad(loss, argnums=1)(p, v).square().sum()

        results = [grad(loss, argnums=(0, 1))(p, v), grad(penalty)(p, v), vmap(mixed, (None, 0))(p, several)]
        results += [jvp(mixed, (p, v), direction), jvp(grad(loss), (p, v), direction)]
        results += [vmap(grad(loss), (None, 0))(p, several)]
        with forward_ad.dual_level():
            results.append(forward_ad.unpack_dual(mixed(p, forward_ad.make_dual(v, v.cos()))).tangent)
        found.append(results)
    assert_close(*found, 1e-9)


@models
def test_gradients_of_each_example(operator):
    """`vmap` of `grad` over the rows of a batch, of a whole language model."""
    found, ids, masks = [], torch.arange(34).view(2, 17) * 7 % 23, mask_of(2, 17)
    for product in WAYS:
        model = language_model(operator, product)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p, row, mask, model=model):
            inputs = {"input_ids": row[None], "attention_mask": mask[None]}
            return cross_entropy(functional_call(model, p, kwargs=inputs).logits[0], row)

        found.append(vmap(grad(loss), (None, 0, 0))(parameters, ids, masks))
        single = grad(loss)(parameters, ids[1], masks[1])
        assert_close({name: g[1] for name, g in found[-1].items()}, single, 1e-9)
    assert_close(*found, 1e-9)


def penalty_gradients(model, mask=None) -> list[torch.Tensor]:
    """A gradient penalty on the embeddings, and its gradients."""
    embeddings = random(2, 17, 8)
    logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), embeddings, create_graph=True)
    penalty = gradient.square().sum()
    return [penalty.detach(), *torch.autograd.grad(penalty, list(model.parameters()), materialize_grads=True)]


@models
def test_gradient_penalty_of_a_model(operator):
    """Also with activations that are computed again, and with padding."""
    for mask in (None, mask_of(2, 17)):
        fused, eager = (language_model(operator, product).train() for product in WAYS)
        found = [penalty_gradients(fused, mask), penalty_gradients(eager, mask)]
        checkpoint_activations(fused, {"use_reentrant": False})
        found.append(penalty_gradients(fused, mask))
        largest = max(g.abs().max().item() for g in found[1][1:])
        for actual, expected, again in zip(*found, strict=True):
            assert relative_error(actual, expected, scale=largest) < 1e-9
            assert relative_error(again, expected, scale=largest) < 1e-9
