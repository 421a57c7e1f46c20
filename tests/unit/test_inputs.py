"""Inputs of every kind: positions, padding without a mask, empty batches, wrong types."""

import pytest
import torch
from transformers import DynamicCache, modeling_utils

from helpers.hybrids import HYBRIDS
from helpers.models import BIDIRECTIONAL, CAUSAL, VARIANTS, lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
    causal_toeplitz_matmul,
    toeplitz_matmul,
)
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification

PAD = 1
# Padding behind, before, on both sides and within a text.
MASKS = {
    "right": [1] * 7 + [0] * 4,
    "left": [0] * 4 + [1] * 7,
    "both": [0] * 2 + [1] * 6 + [0] * 3,
    "hole": [1] * 3 + [0] * 4 + [1] * 4,
    "holes": [0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0],
}


def prompt(mask: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second without padding; ids `(2, L)` with pad tokens, and the mask."""
    ids = torch.randint(3, 99, (2, len(mask)), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([mask, [1] * len(mask)])
    return ids.where(mask == 1, PAD), mask


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("given", [True, False], ids=["given", "inferred"])
@pytest.mark.parametrize("tno_type", [*CAUSAL, "no decay", *HYBRIDS])
def test_generation_after_any_padding(tno_type, given, name):
    """Cached, uncached and in chunks; transformers infers the mask from pad tokens where it is not given."""
    fields = HYBRIDS.get(tno_type) or ({"decay": None} if tno_type == "no decay" else {"tno_type": tno_type})
    model = lively_language_model(**fields)
    ids, mask = prompt(MASKS[name])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "output_logits": True}
    options |= {"return_dict_in_generate": True} | ({"attention_mask": mask} if given else {})
    cached = model.generate(ids, **options)
    ways = {
        "uncached": model.generate(ids, use_cache=False, **options),
        "fused": model.generate(ids, prefill_chunk_size=3, **options),
    }
    for way, output in ways.items():
        assert torch.equal(output.sequences, cached.sequences), way
        for one, other in zip(output.logits, cached.logits, strict=True):
            assert relative_error(one, other) < 1e-6, way  # generate returns float32
    # By hand, without positions.
    whole = torch.cat([mask, torch.ones(2, 12, dtype=torch.long)], dim=1)
    logits = model(cached.sequences, attention_mask=whole, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    assert relative_error(torch.stack(cached.logits, dim=1), logits) < 1e-6


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("way", ["assisted", "prompt lookup", "continued"])
@pytest.mark.parametrize("fields", [{}, *HYBRIDS.values()], ids=["toeplitz", *HYBRIDS])
def test_other_ways_to_generate_after_any_padding(fields, way, name):
    """The decoding methods that take one row."""
    model = lively_language_model(**fields)
    ids, mask = (part[:1] for part in prompt(MASKS[name]))
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(ids, **options)
    if way == "continued":
        first = model.generate(ids, **options | {"max_new_tokens": 5, "return_dict_in_generate": True})
        options["attention_mask"] = torch.cat([mask, torch.ones(1, 5, dtype=torch.long)], dim=1)
        ids = first.sequences
        options |= {"past_key_values": first.past_key_values, "max_new_tokens": 7}
    else:
        helper = {"assistant_model": lively_language_model(tno_type="rtf")}
        options |= helper if way == "assisted" else {"prompt_lookup_num_tokens": 3}
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("head, causal", [(TnnModel, True), (TnnModel, False)])
@pytest.mark.parametrize("position", [0, 5])
def test_constant_positions_mean_nothing(head, causal, position):
    model = seeded(head, tiny_config(causal=causal))
    ids = torch.arange(3, 14)[None]
    constant = model(ids, position_ids=torch.full((1, 11), position)).last_hidden_state
    assert torch.equal(constant, model(ids).last_hidden_state)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("product", ["fused", "eager"])
@pytest.mark.parametrize("tno_type, causal", VARIANTS)
def test_padding_is_replaced(tno_type, causal, product, value):
    """NaN and infinity at padding reach neither outputs nor gradients."""
    model = seeded(TnnModel, tiny_config(tno_type, causal, tno_implementation=product))
    embeds = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([MASKS["holes"], MASKS["right"]])
    results = []
    for filler in (0.5, value):
        model.zero_grad()
        padded = embeds.masked_fill(mask[..., None] == 0, filler).requires_grad_()
        hidden = model(inputs_embeds=padded, attention_mask=mask).last_hidden_state[mask.bool()]
        hidden.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([hidden, padded.grad, *gradients])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_without_a_mask(causal, monkeypatch):
    """As with transformers' own models: a warning, and a causal classifier answers from the last real token."""
    model = seeded(TnnForSequenceClassification, tiny_config(causal=causal, num_labels=3))
    ids, mask = prompt(MASKS["right"])
    warnings = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", warnings.append)
    unmasked = model(ids).logits
    assert any("We strongly recommend passing in an `attention_mask`" in text for text in warnings)
    equal = relative_error(unmasked, model(ids, attention_mask=mask).logits) < 1e-6
    assert equal == causal


def test_padding_without_a_mask_in_pairs():
    model = seeded(TnnForSequencePairClassification, tiny_config(num_labels=3))
    ids, mask = prompt(MASKS["right"])
    ids, mask = torch.stack([ids, ids.flip(0)], dim=1), torch.stack([mask, mask.flip(0)], dim=1)
    assert relative_error(model(ids).logits, model(ids, attention_mask=mask).logits) < 1e-6


def test_a_mask_for_all_rows():
    ids, mask = prompt(MASKS["holes"])
    for head, causal in ((TnnForCausalLM, True), (TnnForMaskedLM, False), (TnnForSequenceClassification, False)):
        model = seeded(head, tiny_config(causal=causal, position_embedding="sinusoidal"))
        expected = model(ids, attention_mask=mask[:1].expand(2, -1)).logits
        assert torch.equal(model(ids, attention_mask=mask[:1]).logits, expected)
    packed = {"position_ids": torch.arange(11)[None] % 6}
    model = seeded(TnnModel, tiny_config())
    expected = model(ids, attention_mask=mask[:1].expand(2, -1), **packed).last_hidden_state
    assert torch.equal(model(ids, attention_mask=mask[:1], **packed).last_hidden_state, expected)


@pytest.mark.parametrize("tno_type, causal", [*((t, True) for t in CAUSAL), *((t, False) for t in BIDIRECTIONAL)])
@pytest.mark.parametrize("product", ["fused", "eager"])
def test_a_batch_without_rows(tno_type, causal, product):
    config = tiny_config(tno_type, causal, tno_implementation=product, eos_token_id=None)
    ids, mask = torch.zeros(0, 5, dtype=torch.long), torch.ones(0, 5, dtype=torch.long)
    lm = seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)
    output = lm(ids, attention_mask=mask, labels=ids)
    assert output.logits.shape == (0, 5, 99) and output.loss.isnan()
    output.logits.sum().backward()
    assert seeded(TnnForSequenceClassification, config)(ids).logits.shape == (0, 2)
    assert lm(inputs_embeds=torch.zeros(0, 5, 32)).logits.shape == (0, 5, 99)
    if causal:
        assert lm.generate(ids, attention_mask=mask, max_new_tokens=4).shape == (0, 5)
        cache = DynamicCache(config=config)
        for _ in range(3):
            assert lm(ids, past_key_values=cache).logits.shape == (0, 5, 99)
            assert lm(ids[:, :1], past_key_values=cache).logits.shape == (0, 1, 99)


IDS = torch.ones(2, 5, dtype=torch.long)
FORWARD = [
    ({"input_ids": [[1, 2]]}, TypeError, r"`input_ids` must be a tensor of shape \(B, L\), got list"),
    ({"input_ids": IDS.float()}, TypeError, "`input_ids` must hold torch.int64 or torch.int32, got torch.float32"),
    ({"input_ids": IDS.bool()}, TypeError, "`input_ids` must hold .*, got torch.bool"),
    ({"input_ids": IDS, "attention_mask": [[1] * 5] * 2}, TypeError, "`attention_mask` must be a tensor .*, got list"),
    (
        {"input_ids": IDS, "attention_mask": IDS.numpy()},
        TypeError,
        "`attention_mask` must be a tensor .*, got ndarray",
    ),
    ({"input_ids": IDS, "attention_mask": {}}, TypeError, "`attention_mask` must be a tensor .*, got dict"),
    (
        {"input_ids": IDS, "attention_mask": torch.ones(3, 5)},
        ValueError,
        r"`attention_mask` must have shape .*, got \(3, 5\)",
    ),
    ({"inputs_embeds": torch.ones(2, 5, 31)}, ValueError, r"`inputs_embeds` must have shape \(B, L, 32\), got"),
    ({"inputs_embeds": torch.ones(2, 32)}, ValueError, r"`inputs_embeds` must have shape \(B, L, 32\), got \(2, 32\)"),
    ({"inputs_embeds": torch.ones(2, 5, 32).long()}, TypeError, "`inputs_embeds` must hold torch.float32 or"),
    ({"input_ids": IDS, "position_ids": [0, 1]}, TypeError, "`position_ids` must be a tensor"),
    ({"input_ids": IDS, "seq_ids": IDS}, TypeError, "`seq_ids` is not an argument of this model"),
]


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification])
@pytest.mark.parametrize("inputs, error, message", FORWARD)
def test_refused(head, inputs, error, message):
    model = seeded(head, tiny_config(causal=head is not TnnForMaskedLM))
    with pytest.raises(error, match=message):
        model(**inputs)


@pytest.mark.parametrize(
    "labels, error, message",
    [
        ([[1] * 5] * 2, TypeError, "`labels` must be a tensor"),
        (IDS.float(), TypeError, "`labels` must hold torch.int64"),
        (IDS[:, :4], ValueError, r"`labels` must have shape \(B, L\) = \(2, 5\), .*, got \(2, 4\)"),
        (IDS + 98, ValueError, r"Entries of `labels` must be in \[0, vocab_size=99\), got 99"),
        (IDS - 3, ValueError, "Entries of `labels` must be in .*, got -2"),
    ],
)
@pytest.mark.parametrize("head", [TnnForCausalLM, TnnForMaskedLM])
def test_refused_labels(head, labels, error, message):
    model = seeded(head, tiny_config(causal=head is TnnForCausalLM))
    with pytest.raises(error, match=message):
        model(IDS, labels=labels)


@pytest.mark.parametrize(
    "labels, error, message",
    [
        ([1, 2], TypeError, "`labels` must be a tensor"),
        (torch.ones(3).long(), ValueError, r"`labels` must have shape .*, got \(3,\)"),
        (torch.tensor([0, 3]), ValueError, r"Entries of `labels` must be in \[0, num_labels=3\), got 3"),
    ],
)
def test_refused_classes(labels, error, message):
    fields = {"causal": False, "image_size": 8, "patch_size": 1, "spatial_dims": 2, "num_labels": 3}
    image = seeded(TnnForImageClassification, tiny_config(**fields))
    text = seeded(TnnForSequenceClassification, tiny_config(num_labels=3))
    for model, inputs in ((text, IDS), (image, torch.zeros(2, 3, 8, 8))):
        with pytest.raises(error, match=message):
            model(inputs, labels=labels)


def test_a_cache_is_for_causal_models():
    model = seeded(TnnForMaskedLM, tiny_config(causal=False))
    with pytest.raises(ValueError, match="`past_key_values` must be None for a model with causal=False"):
        model(IDS, past_key_values=DynamicCache(config=model.config))


def test_what_tokenizers_give_is_taken():
    model = seeded(TnnForCausalLM, tiny_config())
    assert torch.equal(model(IDS, token_type_ids=IDS, head_mask=None).logits, model(IDS.int()).logits)


@pytest.mark.parametrize("matmul", [toeplitz_matmul, causal_toeplitz_matmul])
@pytest.mark.parametrize(
    "v, kernel, error, message",
    [
        (
            torch.ones(1, 4, 2).long(),
            torch.ones(2, 7),
            TypeError,
            "`v` must hold real .*, got torch.int64",
        ),
        (
            torch.ones(1, 4, 2),
            torch.ones(2, 7).bool(),
            TypeError,
            "must hold real floating-point numbers, got torch.bool",
        ),
        (
            torch.ones(1, 4, 2).cfloat(),
            torch.ones(2, 7),
            TypeError,
            "`v` must hold real floating-point numbers, got torch.c",
        ),
        ([[[1.0]]], torch.ones(1, 1), TypeError, "`v` must be a tensor, got list"),
        (
            torch.ones(1, 4, 2),
            torch.ones(2, 7, device="meta"),
            ValueError,
            "must be on the device of v, cpu, got meta",
        ),
    ],
)
def test_refused_products(matmul, v, kernel, error, message):
    with pytest.raises(error, match=message):
        matmul(v, kernel)


@pytest.mark.parametrize("head", [TnnForCausalLM, TnnForMaskedLM])
def test_ignore_index(head):
    model = seeded(lambda: head(tiny_config(vocab_size=60, causal=head is TnnForCausalLM))).eval()
    ids = torch.randint(3, 60, (2, 9))
    labels = ids.masked_fill(torch.arange(9) % 2 == 0, -100)
    other = ids.masked_fill(torch.arange(9) % 2 == 0, -7)
    assert model(ids, labels=other, ignore_index=-7).loss == model(ids, labels=labels).loss
    with pytest.raises(ValueError, match="Entries of `labels` must be in .*, got -7"):
        model(ids, labels=other)


def test_shift_labels():
    """As the labels, if these are shifted before; with them or without."""
    model = seeded(lambda: TnnForCausalLM(tiny_config(vocab_size=60))).eval()
    ids = torch.randint(3, 60, (2, 9))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    expected = model(ids, labels=ids).loss
    assert model(ids, shift_labels=shifted).loss == expected
    assert model(ids, labels=ids.flip(1), shift_labels=shifted).loss == expected
    with pytest.raises(ValueError, match="`shift_labels` must have shape"):
        model(ids, shift_labels=shifted[:, 1:])


def test_shift_labels_are_of_causal_models():
    ids = torch.randint(3, 60, (2, 9))
    with pytest.raises(TypeError, match="`shift_labels` is not an argument"):
        seeded(lambda: TnnForMaskedLM(tiny_config(vocab_size=60, causal=False)))(ids, labels=ids, shift_labels=ids)
