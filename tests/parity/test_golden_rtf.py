"""RTF against the released implementation: kernels, products, gradients, and the exact recurrence."""

import torch

from helpers.parity import Case, named_cases, over
from modeling_tnn import TnnConfig
from modeling_tnn.original.names import split_rational
from modeling_tnn.tno_rtf import CONSTRAINTS, CompanionForm, RtfOperator


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
def test_operator(case: Case):
    operator = rtf_operator(case)
    case.compare(operator, case.input("u"))
    check_kernel(case, operator)


def check_kernel(case: Case, operator: RtfOperator):
    """The released bidirectional kernel is the causal one followed by the reversed anticausal one, from lag -1."""
    expected = case.get("out64/k")
    length = case.run["length"]
    kernel = operator.coefficients(length)
    if operator.causal:
        case.check(kernel, expected)
    else:
        case.check(kernel[:, length - 1 :], expected[:, :length])
        if length > 1:
            case.check(kernel[:, : length - 1], expected[:, length + 1 :])
    constrained = CONSTRAINTS[operator.constraint](operator.denominator, operator.slack)
    case.check(constrained, case.get("out64/a_effective", "all"))


@over(named_cases("derived_rtf_bidir_odd"))
def test_bidirectional_odd_length(case: Case):
    """Where the released code inverts a spectrum with the wrong length: the product it intends."""
    case.parameters_from(case.run["params_from"])
    case.check(rtf_operator(case)(case.input("u")), case.output())


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
def test_exact_recurrence(case: Case):
    case.parameters_from(case.run["params_from"])
    operator = rtf_operator(case)
    form = operator.companion_form()
    case.check(form.denominator, case.output("a"))
    case.check(form.numerator, case.output("c"))
    case.check(form.direct, case.output("h0_effective"))
    case.check(step_through(form, case.input("u")), case.output())
    case.check(operator(case.input("u")), case.output())
    # Beyond the truncation length, far into the third octave, the kernel goes on as its recurrence.
    length = 6 * case.run["trunc_len"] + 1
    impulse = torch.zeros(1, length, operator.channels, dtype=torch.float64)
    impulse[:, 0] = 1
    taps = step_through(form, impulse)[0].t()
    torch.testing.assert_close(operator.coefficients(length), taps, rtol=0, atol=1e-9 * taps.abs().max().item())
