"""Parity with the released implementations: causal and masked language models, classification head."""

import torch

from helpers.models import relative_error
from helpers.parity import (
    Case,
    check_loss,
    masked_lm_config,
    masked_lm_inputs,
    model_config,
    named_cases,
    over,
)
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification


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
    """Without SKI, whose released interpolation is not the published one: see test_golden_ski.py."""
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
