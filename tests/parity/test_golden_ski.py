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
def test_released_operator(case: Case):
    operator = ski_operator(case, **RELEASED)
    if case.get("out64/W") is not None:
        case.check(operator.grid(case.run["n"]).matrix(operator.filter), case.get("out64/W"))
    case.compare(operator, case.input("x"))
    rank = case.hparams["r"]
    kernel = operator.inducing_coefficients(rank)
    case.check(kernel[:, rank - 1 :], case.get("out64/k_inducing_nonneg").t())
    case.check(kernel[:, : rank - 1], case.get("out64/k_inducing_neg_flipped").t())


@over(named_cases("derived_ski_paper"))
def test_published_operator(case: Case):
    case.parameters_from(case.run["params_from"])
    operator = ski_operator(case)
    weights = operator.grid(case.run["n"]).matrix(operator.filter)
    case.check(weights, case.get("out64/W"))
    case.check(operator(case.input("x")), case.output())


@over(bidirectional_cases(), torch.float64)
def test_released_form_differs_on_purpose(case: Case):
    assert relative_error(ski_operator(case)(case.input("x")), case.output()) > 1e-2


@over([c for c in named_cases("block") if "skitno" in c[0]], torch.float64)
def test_released_gated_toeplitz_unit(case: Case):
    config = block_config(case, case.hparams["embed_dim"], causal=False, **RELEASED)
    case.compare(case.load(TnnGatedToeplitzUnit(config, 0)), case.input("x"))


@over([c for c in named_cases("masked_lm") if "/ski" in c[0]], torch.float64)
def test_released_masked_lm(case: Case):
    model = case.load(TnnForMaskedLM(masked_lm_config(case, **RELEASED)))
    outputs = model(**masked_lm_inputs(case), labels=case.ids("labels"))
    case.check(outputs.logits, case.output("logits"))
    check_loss(case, outputs, outputs.logits, case.ids("labels"), "mlm_loss").backward()
    if case.get("grad64/param/encoder.lm_head.bias") is not None:
        case.check_gradients(model)


def test_sparse_part_alone():
    """With the kernel at zero, only the short filter remains."""
    name, tag = next(c for c in bidirectional_cases() if Case(*c).get("out64/y_sparse") is not None)
    case = Case(name, tag)
    operator = ski_operator(case)
    torch.nn.init.zeros_(operator.alphas)
    torch.nn.init.zeros_(operator.betas)
    case.check(operator(case.input("x")), merge_heads(case.get("out64/y_sparse")))
