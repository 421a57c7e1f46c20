"""Released models, whole and with SKI and RTF, against recorded values."""

import torch

from helpers.models import relative_error
from helpers.parity import (
    Case,
    block_config,
    check_loss,
    masked_lm_config,
    masked_lm_inputs,
    merge_heads,
    model_config,
    named_cases,
    operator_config,
    over,
)
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification
from modeling_tnn.mixers import TnnGatedToeplitzUnit
from modeling_tnn.tno_rtf import CONSTRAINTS, CompanionForm, RtfOperator
from modeling_tnn.tno_ski import SkiOperator


def causal_lm(case: Case) -> TnnForCausalLM:
    tied = case.hparams["share_decoder_input_output_embed"]
    return case.load(TnnForCausalLM(model_config(case, "decoder", tie_word_embeddings=tied)))


@over(named_cases("causal_lm"))
def test_causal_lm(case: Case):
    model = causal_lm(case)
    input_ids = case.ids()
    labels = input_ids.masked_fill(input_ids == case.hparams["pad_token_id"], -100)
    outputs = model(input_ids, labels=labels, output_hidden_states=True)
    if case.get("out64/logits") is not None:
        case.check(outputs.logits, case.output("logits"))
    else:
        case.check(outputs.logits[:, -32:], case.output("logits_last32"))
    loss = check_loss(case, outputs, outputs.logits[:, :-1], labels[:, 1:], "loss")
    check_hidden_states(case, model, outputs)
    loss.backward()
    if case.get("grad64/param/decoder.embed_tokens.weight") is not None:
        case.check_gradients(model)


def check_hidden_states(case: Case, model, outputs):
    """All of them: the released ones end before the final norm, where ours show it in the last entry."""
    count = model.config.num_hidden_layers
    for index, hidden in enumerate(outputs.hidden_states):
        if (expected := case.get(f"out64/hidden_{index}")) is None:
            continue
        final = model.base_model.norm if index == count else torch.nn.Identity()
        case.check(hidden, final(expected.to(case.dtype)))


def masked_lm_cases(padded: bool) -> list[tuple[str, str]]:
    """Without SKI, whose released interpolation is not the published one."""
    return [c for c in named_cases("masked_lm") if Case(*c).run["padded"] == padded and "/ski" not in c[0]]


@over(masked_lm_cases(padded=False))
def test_masked_lm(case: Case):
    model = case.load(TnnForMaskedLM(masked_lm_config(case)))
    outputs = model(**masked_lm_inputs(case), labels=case.ids("labels"), output_hidden_states=True)
    case.check(outputs.logits, case.output("logits"))
    case.check(outputs.hidden_states[-1], case.output("features"))
    check_loss(case, outputs, outputs.logits, case.ids("labels"), "mlm_loss").backward()
    if case.get("grad64/param/encoder.lm_head.bias") is not None:
        case.check_gradients(model)


@over(masked_lm_cases(padded=False))
def test_classification_head(case: Case):
    config = masked_lm_config(case, num_labels=case.hparams["num_labels"])
    model = case.load(TnnForSequenceClassification(config))
    outputs = model(**masked_lm_inputs(case), labels=case.ids("class_labels"))
    case.check(outputs.logits, case.output("cls_logits"))
    check_loss(case, outputs, outputs.logits, case.ids("class_labels"), "cls_loss")


@over(masked_lm_cases(padded=True), torch.float64)
def test_padding_differs_on_purpose(case: Case):
    """The released model lets padding into real positions after the first layer; ours does not.

    Rows without padding agree. In the padded row the released features differ from those of the bare text, ours
    do not.
    """
    model = case.load(TnnForMaskedLM(masked_lm_config(case)))
    inputs = masked_lm_inputs(case)
    features = model.model(**inputs).last_hidden_state
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    assert min(lengths) < max(lengths) == features.shape[1]
    for row, length in enumerate(lengths):
        bare = model.model(inputs["input_ids"][row : row + 1, :length]).last_hidden_state[0]
        released = case.output("features")[row, :length]
        assert relative_error(features[row, :length], bare) < 1e-12
        error = relative_error(released, bare)
        assert error < 1e-9 if length == features.shape[1] else error > 1e-2


def lra_config(case: Case) -> TnnConfig:
    hparams, two_dimensional = case.hparams, "2d" in case.name
    return TnnConfig(
        hidden_size=hparams["d_model"],
        causal=hparams["causal"],
        gtu_expansion=hparams["tno_expand_ratio"],
        decay=case.fixed_decay(),
        norm_type="batchnorm",
        rpe_dim=hparams["dpb_embedding"],
        rpe_layers=2,
        rpe_hidden_norm=False,
        rpe_window=None if two_dimensional else hparams["tno_max_l"],
        spatial_dims=2 if two_dimensional else 1,
        max_position_embeddings=64,
    )


@over(named_cases("lra"))
def test_gated_toeplitz_unit(case: Case):
    """The values; the data have no gradients."""
    gtu = case.load(TnnGatedToeplitzUnit(lra_config(case), 0))
    case.check(gtu(case.input("x")), case.output())


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
        both, rows = case.tensors.pop(key), len(operator.numerator)
        denominator, numerator = both[:-rows], both[-rows:]
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
