"""All heads of texts, what they promise alike and what is their own: pooling, losses, spans, choices, learning."""

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache, Trainer, TrainingArguments, modeling_utils

from helpers.heads import IDS, ONES, TEXTS, TextHeadTests, around, both
from helpers.models import VALUES, image_config, relative_error, seeded, tiny_config, values_with_gaps
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.tools.sequence_pairs import TnnForSequencePairClassification

PADS = IDS.where(torch.arange(11) < torch.tensor([[11], [7], [4]]), 1)


HIDDEN = torch.cat([ONES[:, :1], 0 * ONES[:, 1:]], dim=1)


class Wrapper(torch.nn.Module):
    """A user's module around a layer, which has none of its attributes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *arguments):
        return self.layer(*arguments)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["gtu", "hyena", "series", "masked", "image"])
def test_layers_that_a_module_wraps(kind, training):
    """Sizes are asked of the configuration: outputs, loss and forecasts are those of the model."""
    ids, mixer = {"input_ids": IDS, "labels": IDS}, {"toeplitz_mixer": "hyena"} if kind == "hyena" else {}
    cls, config, given = TnnForCausalLM, tiny_config(hidden_dropout_prob=0.0, **mixer), ids
    if kind == "series":
        cls, fields, name = VALUES["series"]
        config = tiny_config(hidden_dropout_prob=0.0, **fields)
        given = {name: values_with_gaps(2, 9, 3), "future_values": torch.ones(2, 4, 3)}
    elif kind == "masked":
        cls, config = TnnForMaskedLM, tiny_config(causal=False, mlp_act="relu", hidden_dropout_prob=0.0)
    elif kind == "image":
        cls, config = TnnForImageClassification, image_config()
        given = {"pixel_values": torch.ones(2, 3, 24, 24), "labels": torch.tensor([0, 1])}
    model = seeded(cls, config).train(training)
    with torch.set_grad_enabled(training):
        expected = model(**given)
        kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv2d)
        for name, layer in list(model.named_modules()):
            if type(layer) in kinds and ".tno." not in name:
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], Wrapper(layer))
        found = model(**given)
    torch.testing.assert_close(tuple(found.to_tuple()[:2]), tuple(expected.to_tuple()[:2]))


class TestModel(TextHeadTests):
    heads = both(TnnModel)

    def answers(self, outputs):
        return outputs.last_hidden_state

    def loss(self, outputs):
        return outputs.last_hidden_state.square().mean()


class TestTokenClassification(TextHeadTests):
    heads, fields = both(TnnForTokenClassification), {"num_labels": 4}
    refused = [
        ({"input_ids": ONES, "labels": ONES + 4}, r"labels` must be in \[0, num_labels=4\), got 5"),
        ({"input_ids": ONES, "labels": ONES[:, 0]}, r"labels` must have shape \(B, L\)"),
    ]

    def labels(self, ids, mask):
        return {"labels": (ids % 4).where(mask, -100)}


class TestQuestionAnswering(TextHeadTests):
    heads, packs = both(TnnForQuestionAnswering), False
    spans = {"input_ids": ONES, "start_positions": ONES[:, 0], "end_positions": ONES[:, 0]}
    refused = [
        (spans | {"start_positions": -ONES[:, 0]}, "start_positions` .* got -1"),
        (spans | {"end_positions": torch.ones(2)}, "end_positions` must hold torch.int64"),
        (spans | {"attention_mask": HIDDEN}, "`start_positions` must be real tokens, .* got padding, 1"),
        (spans | {"attention_mask": HIDDEN, "start_positions": 0 * ONES[:, 0]}, "`end_positions` must be real tokens"),
    ]

    def labels(self, ids, mask):
        """From the first to the last token."""
        last = mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
        return {"start_positions": mask.long().argmax(1), "end_positions": last}

    def answers(self, outputs):
        """At padding the logits are the lowest number there is."""
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).clamp(min=-100)


class TestSequenceClassification(TextHeadTests):
    heads, per_token, packs = both(TnnForSequenceClassification), False, False
    refused = [
        ({"input_ids": ONES, "labels": [1, 2]}, "`labels` must be a tensor"),
        ({"input_ids": ONES, "labels": torch.ones(3).long()}, r"`labels` must have shape .*, got \(3,\)"),
        ({"input_ids": ONES, "labels": torch.tensor([0, 3])}, r"Entries of `labels` .* \[0, num_labels=2\), got 3"),
        ({"input_ids": ONES, "labels": -100 * torch.ones(2, 2)}, r"Entries of `labels` .* \[0, 1\] .*, got -100"),
    ]

    def labels(self, ids, mask):
        return {"labels": mask.sum(1) // 4 % 2}


class TestMultipleChoice(TestSequenceClassification):
    """Each text, and the same one backwards."""

    heads, silent = both(TnnForMultipleChoice), ("classifier.out_proj.bias",)
    refused = [
        ({"input_ids": ONES}, "input_ids` must have shape .B, C, L."),
        ({}, "input_ids` must be a tensor"),
        ({"input_ids": ONES[:, None], "attention_mask": ONES}, "attention_mask` must have shape .* got .10,."),
        ({"input_ids": IDS[:, None].expand(-1, 3, -1), "labels": IDS[:, 0]}, r"labels` must be in \[0, .*3\), got"),
    ]

    def given(self, ids, mask=None):
        return {name: torch.stack([x, x.flip(1)], 1) for name, x in super().given(ids, mask).items()}  # (B, C, L)


class TestPairs(TestMultipleChoice):
    heads = both(TnnForSequencePairClassification)
    refused = [({"input_ids": ONES}, "input_ids`"), ({"input_ids": IDS[None]}, "input_ids`")]
    test_equal_inputs = test_padding_reaches_nothing = test_packed_rows = None  # it takes ids alone


@pytest.mark.parametrize(
    ("pooling", "causal"), [(None, True), (None, False), ("last", True), ("last", False), ("mean", True)]
)
def test_pooled_are_the_real_tokens(pooling, causal):
    """None follows the direction; the features of a pair are both vectors, their product and their difference."""
    fields = {"causal": causal, "classifier_pooling": pooling}
    model, pairs = (
        seeded(h, tiny_config(**fields)) for h in (TnnForSequenceClassification, TnnForSequencePairClassification)
    )
    pooling = pooling or ("last" if causal else "mean")
    for side in ("left", "right", "both"):
        ids, mask = around(TEXTS, side)
        hidden = model.model(ids, attention_mask=mask.long()).last_hidden_state
        rows = [
            states[real][-1] if pooling == "last" else states[real].mean(0)
            for states, real in zip(hidden, mask, strict=True)
        ]
        found = model(ids, attention_mask=mask.long()).logits
        torch.testing.assert_close(found, model.classifier(torch.stack(rows)))
    pairs.model.load_state_dict(model.model.state_dict())
    a, b = rows[:2]
    found = pairs(ids[None, :2], attention_mask=mask[None, :2].long()).logits[0]
    torch.testing.assert_close(found, pairs.classifier(torch.cat([a, b, a * b, a - b])))
    model = seeded(TnnForSequenceClassification, tiny_config(**fields, classifier_act=None, num_labels=4))
    states = model.model(IDS).last_hidden_state
    expected = functional.linear(
        states[:, -1] if pooling == "last" else states.mean(1), *model.classifier.parameters()
    )
    torch.testing.assert_close(model(IDS).logits, expected, msg="a head of one layer")


@pytest.mark.parametrize(
    "head", [TnnForSequenceClassification, TnnForMultipleChoice, TnnForSequencePairClassification]
)
def test_padding_without_a_mask(head, monkeypatch):
    """As in transformers: a warning, and a causal classifier answers from the last token that is no pad token."""
    ids, warnings = PADS if head is TnnForSequenceClassification else torch.stack([PADS, PADS.roll(1, 0)], 1), []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", warnings.append)
    for causal in (True, False):
        model = seeded(head, tiny_config(causal=causal))
        difference = relative_error(model(ids).logits, model(ids, attention_mask=(ids != 1).long()).logits)
        assert (difference < 1e-6) == causal
        assert any("We strongly recommend passing in an `attention_mask`" in text for text in warnings)
        warnings.clear()


def test_a_continued_text():
    """Its last token is the answer; the mean is refused, since the hidden states that a cache stands for are gone."""
    for pooling in ("last", "mean"):
        model = seeded(TnnForSequenceClassification, tiny_config(classifier_pooling=pooling))
        cache = DynamicCache(config=model.config)
        begun = model(IDS[:, :5], past_key_values=cache)
        torch.testing.assert_close(begun.logits, model(IDS[:, :5]).logits)
        if pooling == "mean":
            with pytest.raises(ValueError, match="`past_key_values` must be empty with classifier_pooling='mean'"):
                model(IDS[:, 5:], past_key_values=cache)
            assert cache.get_seq_length() == 5
        else:
            assert relative_error(model(IDS[:, 5:], past_key_values=cache).logits, model(IDS).logits) < 5e-6


def test_classification_losses():
    """By the problem, or by the type and shape of the labels."""
    classes, floats = torch.tensor([0, 2, 1]), torch.tensor([0.5, -1.0, 2.0])
    several = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])
    for problem, num_labels, labels, loss in (
        ("single_label_classification", 3, classes, functional.cross_entropy),
        ("regression", 1, floats, functional.mse_loss),
        ("regression", 2, torch.randn(3, 2), functional.mse_loss),
        ("multi_label_classification", 3, several, functional.binary_cross_entropy_with_logits),
    ):
        for given in (problem,) if num_labels == 2 else (problem, None):
            config = tiny_config(causal=False, num_labels=num_labels, problem_type=given)
            outputs = seeded(TnnForSequenceClassification, config)(IDS, labels=labels)
            torch.testing.assert_close(outputs.loss, loss(outputs.logits.squeeze(), labels))


def test_spans():
    """At padding a logit is the lowest number; a place outside the text is ignored."""
    model, (ids, mask) = seeded(TnnForQuestionAnswering, tiny_config(causal=False)), around(TEXTS, "both")
    outputs = model(ids, attention_mask=mask.long())
    for logits in (outputs.start_logits, outputs.end_logits):
        assert (logits[~mask] == torch.finfo(logits.dtype).min).all()
    outside = torch.tensor([1, 99])
    first = model(IDS[:1], start_positions=outside[:1], end_positions=outside[:1]).loss
    assert model(IDS[[0, 0]], start_positions=outside, end_positions=outside).loss.item() == pytest.approx(
        first.item()
    )


def test_choices_are_scored_alone():
    """As by a classifier with one label and the same weights."""
    model = seeded(TnnForMultipleChoice, tiny_config())
    classifier = seeded(TnnForSequenceClassification, tiny_config(num_labels=1))
    classifier.load_state_dict(model.state_dict())
    expected = torch.cat([classifier(ids).logits for ids in (IDS, IDS.flip(1), IDS.roll(1))], dim=1)
    outputs = model(torch.stack([IDS, IDS.flip(1), IDS.roll(1)], dim=1), labels=torch.tensor([2, 0, 1]))
    assert relative_error(outputs.logits, expected) < 1e-5
    torch.testing.assert_close(outputs.loss, functional.cross_entropy(expected, torch.tensor([2, 0, 1])))


@pytest.mark.parametrize("head", [TnnForSequenceClassification, TnnForQuestionAnswering, TnnForMultipleChoice])
def test_a_head_on_another_device(head):
    """`device_map` may put the last layers elsewhere than the inputs; a CPU alone has the meta device for that."""

    def to_meta(module, args, outputs):
        outputs.last_hidden_state = outputs.last_hidden_state.to("meta")
        return outputs

    for causal in (True, False):
        model = seeded(head, tiny_config(causal=causal))
        model.model.register_forward_hook(to_meta)
        (model.qa_outputs if head is TnnForQuestionAnswering else model.classifier).to("meta")
        ids = IDS[:, None] if head is TnnForMultipleChoice else IDS
        assert model(ids, attention_mask=torch.ones_like(ids), return_dict=False)[0].is_meta


def tagged(seed: int) -> dict:
    """Tokens and whether the next one is larger, which needs a look at both."""
    ids = torch.randint(3, 99, (12,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": (ids.roll(-1) > ids).long()}


def chosen(seed: int) -> dict:
    """The choice with the token 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (3, 12), generator=generator)
    label = int(torch.randint(0, 3, (), generator=generator))
    ids[label, int(torch.randint(0, 12, (), generator=generator))] = 1
    return {"input_ids": ids, "labels": label}


TASKS = {TnnForTokenClassification: tagged, TnnForMultipleChoice: chosen}


@pytest.mark.parametrize("head", [TnnForTokenClassification, TnnForMultipleChoice])
def test_accumulated_steps(head, tmp_path):
    """Two batches of four are one of eight, also where they have other numbers of labels."""
    rows = [TASKS[head](seed) for seed in range(8)]
    if head is TnnForTokenClassification:
        for row in rows[:4]:
            row["labels"][3:] = -100
    weights = []
    for size in (8, 4):
        model = seeded(head, tiny_config(causal=False, num_labels=2, hidden_dropout_prob=0.0))
        arguments = TrainingArguments(
            tmp_path, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            learning_rate=0.1, optim="sgd", max_grad_norm=0.0, use_cpu=True, disable_tqdm=True, report_to="none",
            save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert relative_error(*weights) < 1e-6
