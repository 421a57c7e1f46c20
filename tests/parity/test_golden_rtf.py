"""RTF against the released implementation: kernels, products, gradients, and the exact recurrence."""

import torch

from helpers.parity import Case, named_cases, over
from modeling_tnn import TnnConfig
from modeling_tnn.tno_rtf import CONSTRAINTS, CompanionForm, RtfOperator
from tnn_scripts.original.names import split_rational


def rtf_operator(case: Case) -> RtfOperator:
    hparams = case.hparams
    config = TnnConfig(
        tno_type="rtf",
        causal=not hparams["bidirectional"],
        hidden_size=hparams["d_model"],
        gtu_expansion=1,
        rtf_state_size=hparams["state_size"],
        rtf_num_denominators=hparams["num_a"],
        rtf_constraint=None if hparams["constraint"] == "no" else hparams["constraint"],
        max_position_embeddings=hparams["trunc_len"],
    )
    operator = RtfOperator(config)
    for key in [key for key in case.tensors if key.endswith("param/ab")]:
        denominator, numerator = split_rational(case.tensors.pop(key), len(operator.numerator))
        case.tensors[key.replace("/ab", "/denominator")] = denominator
        case.tensors[key.replace("/ab", "/numerator")] = numerator
    return case.load(operator)


@over(named_cases("rtf"))
def test_operator(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    operator = rtf_operator(case)
    u = case.input("u").clone().requires_grad_()
    y = operator(u)
    case.check(y, case.output(), record_property)
    check_kernel(case, operator, record_property)
    if case.get("in/w") is not None:
        (y * case.input("w")).sum().backward()
        case.check_gradients(operator, u, record_property)


def check_kernel(case: Case, operator: RtfOperator, record):
    """The released bidirectional kernel is the causal one followed by the reversed anticausal one, from lag -1."""
    expected = case.get("out64/k")
    length = case.run["length"]
    kernel = operator.coefficients(length)
    if operator.causal:
        case.check(kernel, expected, record)
    else:
        case.check(kernel[:, length - 1 :], expected[:, :length], record)
        if length > 1:
            case.check(kernel[:, : length - 1], expected[:, length + 1 :], record)
    constrained = CONSTRAINTS[operator.constraint](operator.denominator, operator.slack)
    case.check(constrained, case.get("out64/a_effective", "all"), record)


@over(named_cases("derived_rtf_bidir_odd"))
def test_bidirectional_odd_length(name, tag, dtype, record_property):
    """Where the released code inverts a spectrum with the wrong length: the product it intends."""
    case = Case(name, tag, dtype)
    case.parameters_from(case.run["params_from"])
    case.check(rtf_operator(case)(case.input("u")), case.output(), record_property)


def step_through(form: CompanionForm, u: torch.Tensor) -> torch.Tensor:
    """The recurrence of `form`, one step at a time: `(B, L, D)` to `(B, L, D)`."""
    state = u.new_zeros(u.shape[0], *form.denominator.shape)  # (B, D, N), newest first
    outputs = []
    for now in u.unbind(1):
        outputs.append(form.direct * now + (form.numerator * state).sum(-1))
        newest = now - (form.denominator * state).sum(-1)
        state = torch.cat([newest[..., None], state[..., :-1]], dim=-1)
    return torch.stack(outputs, dim=1)


@over(named_cases("derived_rtf_recurrence"), torch.float64)
def test_exact_recurrence(name, tag, dtype, record_property):
    case = Case(name, tag)
    case.parameters_from(case.run["params_from"])
    operator = rtf_operator(case)
    form = operator.companion_form()
    case.check(form.denominator, case.output("a"), record_property)
    case.check(form.numerator, case.output("c"), record_property)
    case.check(form.direct, case.output("h0_effective"), record_property)
    case.check(step_through(form, case.input("u")), case.output(), record_property)
    case.check(operator(case.input("u")), case.output(), record_property)


@over(named_cases("derived_rtf_recurrence"), torch.float64)
def test_kernel_goes_on_as_its_recurrence(name, tag, dtype, record_property):
    """Beyond the truncation length, far into the third octave."""
    case = Case(name, tag)
    case.parameters_from(case.run["params_from"])
    operator = rtf_operator(case)
    length = 6 * case.run["trunc_len"] + 1
    impulse = torch.zeros(1, length, operator.channels, dtype=torch.float64)
    impulse[:, 0] = 1
    expected = step_through(operator.companion_form(), impulse)[0].t()
    torch.testing.assert_close(
        operator.coefficients(length), expected, rtol=0, atol=1e-9 * expected.abs().max().item()
    )
