"""SKI against the released implementation (`ski_interpolation="released"`) and the published form.

The released interpolation matrix is not linear interpolation (see the README of the golden vectors).
"""

import torch

from helpers.models import relative_error
from helpers.parity import (
    Case,
    block_config,
    check_loss,
    masked_lm_config,
    masked_lm_inputs,
    merge_heads,
    named_cases,
    operator_config,
    over,
)
from modeling_tnn import TnnForMaskedLM
from modeling_tnn.mixers import TnnGatedToeplitzUnit
from modeling_tnn.tno_ski import SkiOperator

RELEASED = {"ski_interpolation": "released"}


def ski_operator(case: Case, **fields) -> SkiOperator:
    hparams = case.hparams
    config = operator_config(
        case,
        "ski",
        ski_rank=hparams["r"],
        ski_filter_size=hparams["nk"],
        ski_decay=torch.tensor(hparams["gamma"]).item(),
        max_position_embeddings=max(case.run["n"], hparams["r"]),
        **fields,
    )
    operator = case.load(SkiOperator(config))
    operator.longest = case.run["n"]  # the published grid ends with the sequence, even one shorter than the rank
    return operator


def bidirectional_cases() -> list[tuple[str, str]]:
    return [c for c in named_cases("tno_ski") if not Case(*c).hparams["causal"]]


@over(bidirectional_cases())
def test_released_operator(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    operator = ski_operator(case, **RELEASED)
    if case.get("out64/W") is not None:
        case.check(operator.grid(case.run["n"]).matrix(operator.filter), case.get("out64/W"), record_property)
    x = case.input("x").clone().requires_grad_()
    y = operator(x)
    case.check(y, case.output(), record_property)
    rank = case.hparams["r"]
    kernel = operator.inducing_coefficients(rank)
    case.check(kernel[:, rank - 1 :], case.get("out64/k_inducing_nonneg").t(), record_property)
    case.check(kernel[:, : rank - 1], case.get("out64/k_inducing_neg_flipped").t(), record_property)
    if case.get("in/w") is not None:
        (y * case.input("w")).sum().backward()
        case.check_gradients(operator, x, record_property)


@over(named_cases("derived_ski_paper"))
def test_published_operator(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    case.parameters_from(case.run["params_from"])
    operator = ski_operator(case)
    weights = operator.grid(case.run["n"]).matrix(operator.filter)
    case.check(weights, case.get("out64/W"), record_property)
    case.check(operator(case.input("x")), case.output(), record_property)


@over(bidirectional_cases(), torch.float64)
def test_released_form_differs_on_purpose(name, tag, dtype, record_property):
    case = Case(name, tag)
    assert relative_error(ski_operator(case)(case.input("x")), case.output()) > 1e-2


@over([c for c in named_cases("block") if "skitno" in c[0]], torch.float64)
def test_released_gated_toeplitz_unit(name, tag, dtype, record_property):
    case = Case(name, tag)
    config = block_config(case, case.hparams["embed_dim"], causal=False, **RELEASED)
    gtu = case.load(TnnGatedToeplitzUnit(config, 0))
    x = case.input("x").clone().requires_grad_()
    y = gtu(x)
    case.check(y, case.output(), record_property)
    if case.get("in/w") is not None:
        (y * case.input("w")).sum().backward()
        case.check_gradients(gtu, x, record_property)


@over([c for c in named_cases("masked_lm") if "/ski" in c[0]], torch.float64)
def test_released_masked_lm(name, tag, dtype, record_property):
    case = Case(name, tag)
    model = case.load(TnnForMaskedLM(masked_lm_config(case, **RELEASED)))
    outputs = model(**masked_lm_inputs(case), labels=case.ids("labels"))
    case.check(outputs.logits, case.output("logits"), record_property)
    check_loss(case, outputs, outputs.logits, case.ids("labels"), "mlm_loss", record_property).backward()
    if case.get("grad64/param/encoder.lm_head.bias") is not None:
        case.check_gradients(model, None, record_property)


def test_sparse_part_alone(record_property):
    """With the kernel at zero, only the short filter remains."""
    name, tag = next(c for c in bidirectional_cases() if Case(*c).get("out64/y_sparse") is not None)
    case = Case(name, tag)
    operator = ski_operator(case)
    torch.nn.init.zeros_(operator.alphas)
    torch.nn.init.zeros_(operator.betas)
    case.check(operator(case.input("x")), merge_heads(case.get("out64/y_sparse")), record_property)
