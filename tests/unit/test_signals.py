"""Real-valued input: what the heads of tokens promise, of values; missing values, forecasts, audio, regression."""

import pytest
import torch
from torch.nn import functional

from helpers.heads import HOLES, IDS, TextHeadTests, both
from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.signals import standardize

CHANNELS = 3
# The values that stand for the tokens of the tests of texts; some are missing.
VALUES = torch.randn(99, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
VALUES[::5, 1], VALUES[::7] = torch.nan, torch.nan
SERIES = VALUES[1:12].nan_to_num()[None]  # (1, 11, C)


class SignalHeadTests(TextHeadTests):
    """The properties of a head of texts, of signals: NaN and infinity at padding are values too."""

    fields, name = {"input_channels": CHANNELS}, "input_values"

    def given(self, ids, mask=None):
        given = super().given(ids, mask)
        return {self.name: VALUES[given.pop("input_ids")]} | given

    def test_values_at_padding_reach_nothing(self, causal):
        """Nor do their gradients; and no gradient is NaN because a value is missing."""
        model, results, given = self.build(causal), [], self.given(IDS, HOLES)
        padding = given["attention_mask"][..., None] == 0
        for filler in (0.5, torch.nan, -torch.inf):
            model.zero_grad()
            filled = given[self.name].masked_fill(padding, filler).requires_grad_()
            answers = self.answers(model(**given | {self.name: filled}))
            real = answers[HOLES] if self.per_token else answers[:2]
            real.square().sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append([real, filled.grad.masked_fill(padding, 0), *gradients])
        for clean, *poisoned in zip(*results, strict=True):
            assert clean.isfinite().all()
            assert all(relative_error(one, clean) < 1e-6 for one in poisoned)


class TestModel(SignalHeadTests):
    heads = both(TnnModel)
    refused = [
        ({"input_ids": IDS}, "`input_ids` must be None for a model with input_channels=3, got ids"),
        ({}, "Exactly one of `input_values` and `inputs_embeds` must be given, got none"),
        ({"input_values": SERIES, "inputs_embeds": torch.ones(1, 11, 32)}, "Exactly one of .*, got both"),
        ({"input_values": SERIES[..., :2]}, r"`input_values` must have shape \(B, L, 3\), got \(1, 11, 2\)"),
        ({"input_values": SERIES[0]}, r"`input_values` must have shape \(B, L, 3\), got \(11, 3\)"),
        ({"input_values": SERIES.long()}, "`input_values` must hold torch.float32 or"),
        ({"input_values": SERIES.tolist()}, "`input_values` must be a tensor of shape .*, got list"),
        ({"input_values": SERIES[:, :0]}, "length of the sequence must be at least 1"),
        ({"inputs_embeds": torch.ones(1, 11, 31)}, r"`inputs_embeds` must have shape \(B, L, 32\), got"),
    ]

    def answers(self, outputs):
        return outputs.last_hidden_state

    def loss(self, outputs):
        return outputs.last_hidden_state.square().mean()


class TestSequenceClassification(SignalHeadTests):
    heads, per_token, packs = both(TnnForSequenceClassification), False, False

    def labels(self, ids, mask):
        return {"labels": mask.sum(1) // 4 % 2}


class TestSequenceRegression(TestSequenceClassification):
    fields = {"input_channels": CHANNELS, "num_labels": 1, "problem_type": "regression"}

    def labels(self, ids, mask):
        return {"labels": mask.sum(1) / 4}


class TestTokenClassification(SignalHeadTests):
    heads, fields = both(TnnForTokenClassification), {"input_channels": CHANNELS, "num_labels": 4}

    def labels(self, ids, mask):
        return {"labels": (ids % 4).where(mask, -100)}


class TestTokenRegression(SignalHeadTests):
    """The loss is a mean over the labels, of which the missing ones are left out."""

    heads = both(TnnForTokenClassification)
    fields = {"input_channels": CHANNELS, "num_labels": 2, "problem_type": "regression"}
    refused = [
        ({"input_values": SERIES, "labels": torch.ones(1, 11)}, r"`labels` must have shape .* \(1, 11, 2\)"),
        ({"input_values": SERIES, "labels": torch.ones(1, 11, 2).long()}, "`labels` must hold torch.float32"),
    ]

    def labels(self, ids, mask):
        labels = VALUES[:, :2][ids % 30]
        return {"labels": labels.masked_fill(~mask[..., None], torch.nan)}

    def test_loss(self, causal):
        model, given = self.build(causal), self.given(IDS)
        labels = self.labels(IDS, torch.ones_like(IDS).bool())["labels"]
        outputs, seen = model(**given, labels=labels), ~labels.isnan()
        assert 0 < seen.sum() < seen.numel()
        torch.testing.assert_close(outputs.loss, functional.mse_loss(outputs.logits[seen], labels[seen].float()))
        one = self.build(causal, num_labels=1)
        flat, last = (one(**given, labels=values).loss for values in (labels[..., 0], labels[..., :1]))
        assert torch.equal(flat, last) and not one.accepts_loss_kwargs

    test_padding = None  # its counts are those of classes


class TestQuestionAnswering(SignalHeadTests):
    heads, packs = both(TnnForQuestionAnswering), False

    def labels(self, ids, mask):
        last = mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
        return {"start_positions": mask.long().argmax(1), "end_positions": last}

    def answers(self, outputs):
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1).clamp(min=-100)


class TestMultipleChoice(TestSequenceClassification):
    heads, silent = both(TnnForMultipleChoice), ("classifier.out_proj.bias",)

    def given(self, ids, mask=None):
        return {name: torch.stack([x, x.flip(1)], 1) for name, x in super().given(ids, mask).items()}


class TestAudioClassification(TestSequenceClassification):
    """Samples `(B, L)` of one channel."""

    heads, fields = both(TnnForAudioClassification), {"input_channels": 1}

    def given(self, ids, mask=None):
        return {name: one[..., 0] if name == self.name else one for name, one in super().given(ids, mask).items()}

    def test_values_at_padding_reach_nothing(self, causal):
        """With a dimension of one channel too, which is the same input."""
        model, (samples, mask) = self.build(causal), self.given(IDS, HOLES).values()
        expected = model(samples, mask).logits
        filled = samples.masked_fill(mask == 0, torch.nan)
        assert torch.equal(model(samples[..., None], mask).logits, expected)
        assert relative_error(model(filled, mask).logits[:2], expected[:2]) < 1e-6


class TestTimeSeriesPrediction(SignalHeadTests):
    heads, per_token, packs, name = both(TnnForTimeSeriesPrediction), False, False, "past_values"
    fields = {"input_channels": CHANNELS, "prediction_length": 5}
    refused = [
        ({"past_values": SERIES[..., :2]}, r"`past_values` must have shape \(B, L, 3\), got \(1, 11, 2\)"),
        ({}, r"`past_values` must be a tensor of shape \(B, L, 3\), got NoneType"),
        ({"past_values": SERIES, "past_observed_mask": torch.ones(1, 11)}, r"`past_observed_mask` .* \(1, 11, 3\)"),
        ({"past_values": SERIES, "future_values": SERIES}, r"`future_values` must have shape .* \(1, 5, 3\), got"),
        ({"past_values": SERIES, "input_ids": IDS}, "input_ids"),
    ]

    def labels(self, ids, mask):
        return {"future_values": VALUES[mask.sum(1)[:, None] + torch.arange(5)].nan_to_num()}

    def answers(self, outputs):
        return outputs.prediction_outputs

    test_padding_reaches_nothing = test_equal_inputs = None  # there are no embeddings in place of past values


def test_parameters_of_a_model_of_values():
    """There is no vocabulary, and a model of tokens has none of these; embeddings have a scale of their own."""
    model = seeded(TnnModel, tiny_config(input_channels=CHANNELS))
    assert model.embed_tokens is None and model.main_input_name == "input_values"
    assert model.get_input_embeddings() is model.embed_values and model.embedding_scale == 1
    tokens = seeded(TnnModel, tiny_config())
    assert not any("embed_values" in name for name in tokens.state_dict())
    with pytest.raises(ValueError, match="`input_values` must be None for a model with input_channels=None"):
        tokens(input_values=SERIES)
    for head, fields in (
        (TnnForCausalLM, {}), (TnnForMaskedLM, {"causal": False}), (TnnForImageClassification, {"causal": False}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="`input_channels` must be None"):
            head(tiny_config(input_channels=CHANNELS, **fields))
    for head in (TnnForAudioClassification, TnnForTimeSeriesPrediction):
        with pytest.raises(ValueError, match="`input_channels` must be .*, got None"):
            head(tiny_config(prediction_length=2))
    with pytest.raises(ValueError, match="`prediction_length` must be a number .*, got None"):
        TnnForTimeSeriesPrediction(tiny_config(input_channels=1))


def test_embedding_of_missing_values():
    """W [values, observed] + b, written out."""
    model = seeded(TnnModel, tiny_config(input_channels=CHANNELS)).double()
    weight, bias = model.embed_values.projection.parameters()
    values = VALUES[None, :17]
    observed = (~values.isnan()).double()
    expected = values.nan_to_num() @ weight[:, :CHANNELS].t() + observed @ weight[:, CHANNELS:].t() + bias
    assert relative_error(model.embed_values(values), expected) < 1e-14
    assert relative_error(model(input_values=values)[0], model(inputs_embeds=expected)[0]) < 1e-12


def test_scaling():
    """The mean and deviation of what is observed; none of a constant or of nothing is NaN."""
    values = VALUES[torch.randint(99, (2, 17), generator=torch.Generator().manual_seed(0))]
    values[0, :, 2], values[1, :, 0] = torch.nan, 4.0
    observed, mask = torch.rand(2, 17, CHANNELS) < 0.7, torch.arange(17) < torch.tensor([[17], [9]])
    scaled, loc, scale = standardize(values, observed, mask)
    seen = observed & mask[..., None] & ~values.isnan()
    assert torch.equal(scaled.isfinite(), seen)
    for row in range(2):
        for channel in range(CHANNELS):
            found = values[row, :, channel][seen[row, :, channel]]
            mean = found.mean() if len(found) else torch.zeros(())
            torch.testing.assert_close(loc[row, 0, channel], mean.double())
            if len(found) and found.std() > 0:
                torch.testing.assert_close(scale[row, 0, channel], found.var(unbiased=False).sqrt(), rtol=1e-9, atol=0)
            else:
                assert 0 < scale[row, 0, channel] <= 1e-12 * max(mean, 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-4), (torch.float16, 2e-3)])
def test_forecasts_in_any_units(dtype, tolerance):
    """Forecasts of values c times as large are c times as large, and the loss is the same, each channel in its units.

    Channels of one number, of zeros and without values are among them, and padding. The loss is that of scaled values.
    """
    model = seeded(TnnForTimeSeriesPrediction, tiny_config(input_channels=6, prediction_length=4)).to(dtype)
    values = torch.randn(3, 21, 6, generator=torch.Generator().manual_seed(0)).double()
    values[..., 1] += 100
    values[:, :17, 3], values[:, :17, 4], values[0, :17, 5], values[:, ::5, :3] = 7.3, 0, torch.nan, torch.nan
    mask = torch.ones(3, 17).long()
    mask[1, :4] = 0

    def forecast(units):
        past, future = (values * units).to(torch.promote_types(dtype, torch.float32)).split([17, 4], dim=1)
        return model(past, future_values=future, attention_mask=mask)

    usual = forecast(1)
    targets, predictions = (
        (one - usual.loc) / usual.scale for one in (values[:, 17:], usual.prediction_outputs.double())
    )
    errors = (predictions - targets).square()
    errors[..., 3:5], errors[0, :, 5] = 0, 0  # they have no scale
    errors[values[:, 17:].isnan()] = torch.nan
    assert relative_error(usual.loss, errors.nanmean()) < 10 * tolerance
    assert usual.prediction_outputs[..., 4].abs().max() < 1e-30
    assert relative_error(usual.prediction_outputs[..., 3], torch.full((3, 4), 7.3)) < 1e-3
    for power in (-30, -12, -6, -3, 3, 12, 30):
        for units in (torch.full((6,), 10.0).double() ** power, torch.tensor([1, 10, 1, 0.1, 1, 1]).double() ** power):
            found = forecast(units)
            expected, moved = (one.double() for one in (usual.prediction_outputs, found.prediction_outputs))
            for channel in (0, 1, 2, 3, 5):
                assert relative_error((moved / units)[..., channel], expected[..., channel]) < tolerance
            assert relative_error(found.loss, usual.loss) < 10 * tolerance


def test_half_precision_reads_large_values():
    """Values beyond the largest number of float16, 65,504, are read, also by autocast; larger ones are finite."""
    model = seeded(TnnForTokenClassification, tiny_config("s4d", input_channels=CHANNELS))
    values = torch.randn(2, 17, CHANNELS, generator=torch.Generator().manual_seed(0)) * 1e5
    values[0, 3] = torch.nan
    expected = model(input_values=values).logits
    with torch.autocast("cpu", torch.float16):
        mixed = model(input_values=values).logits
    for found in (mixed, model.half()(input_values=values).logits):
        assert relative_error(found, expected) < 0.01
    assert model(input_values=values * 1e6).logits.isfinite().all()


@pytest.mark.parametrize(
    ("tno_type", "causal", "fields"),
    [("rtf", True, {}), ("s4d", True, {}), ("rpe", True, {}), ("fd", False, {}), ("rtf", True, {"pooling": "mean"})],
)
def test_forecasts_are_passes_over_all_values(tno_type, causal, fields):
    """A forecast with the cache is that of passes over all, whose predictions are read as values; padding is left out.

    The state of a recurrence has one size, whatever was read.
    """
    given = {"input_channels": CHANNELS, "prediction_length": 3, "classifier_pooling": fields.get("pooling")}
    model = seeded(TnnForTimeSeriesPrediction, tiny_config(tno_type, causal, **given)).double()
    past = VALUES[20:37][None]
    scaled, loc, scale = standardize(past, None, None)
    read = scaled
    for _ in range(4):
        states = model.model(input_values=read, use_cache=False).last_hidden_state
        pooled = states[:, -1] if model.config.pooling == "last" else states.mean(1)
        read = torch.cat([read, model.prediction_head(pooled).view(1, 3, CHANNELS)], dim=1)
    expected = read[:, 17:28] * scale + loc  # (1, 11, C)
    lengths = []
    with model.model.register_forward_hook(
        lambda module, args, kwargs, outputs: lengths.append(kwargs["input_values"].shape[1]), with_kwargs=True
    ):
        forecast = model.generate(past, prediction_length=11).sequences
    assert relative_error(forecast, expected[:, None]) < 1e-9
    cached = causal and model.config.pooling == "last"
    assert lengths == ([17, 3, 3, 3] if cached else [17, 20, 23, 26])
    assert torch.equal(model.generate(past).sequences[:, 0], model(past).prediction_outputs)
    batch = torch.cat([functional.pad(past, (0, 0, 4, 0)), functional.pad(past, (0, 0, 0, 4), value=torch.inf)])
    mask = torch.ones(2, 21).long()
    mask[0, :4], mask[1, 17:] = 0, 0
    padded = model.generate(batch, attention_mask=mask, prediction_length=11).sequences
    assert all(relative_error(one[None], forecast) < 1e-9 for one in padded)
    with pytest.raises(ValueError, match="`prediction_length` must be at least 1, got 0"):
        model.generate(past, prediction_length=0)
