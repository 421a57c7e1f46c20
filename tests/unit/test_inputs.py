"""Inputs of every kind: padding before generation, positions, empty batches, labels, wrong types."""

import pytest
import torch
from transformers import DynamicCache

from helpers.hybrids import HYBRIDS
from helpers.models import CAUSAL, lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
    causal_toeplitz_matmul,
    toeplitz_matmul,
)

PAD = 1
# Padding behind, before, on both sides and within a text; and none.
MASKS = torch.tensor(
    [
        [1] * 7 + [0] * 4,
        [0] * 4 + [1] * 7,
        [0] * 2 + [1] * 6 + [0] * 3,
        [1] * 3 + [0] * 4 + [1] * 4,
        [0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0],
        [1] * 11,
    ]
)
PROMPT = torch.randint(3, 99, MASKS.shape, generator=torch.Generator().manual_seed(3)).where(MASKS == 1, PAD)
IDS = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize("tno_type", [*CAUSAL, "no decay", *HYBRIDS])
def test_generation_after_any_padding(tno_type):
    """Cached, uncached and in chunks; transformers infers the mask from pad tokens where it is not given."""
    fields = HYBRIDS.get(tno_type) or ({"decay": None} if tno_type == "no decay" else {"tno_type": tno_type})
    model = lively_language_model(**fields)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    cached = model.generate(PROMPT, attention_mask=MASKS, **options)
    # By hand, without positions.
    whole = torch.cat([MASKS, torch.ones(6, 12, dtype=torch.long)], dim=1)
    logits = model(cached.sequences, attention_mask=whole, use_cache=False).logits[:, PROMPT.shape[1] - 1 : -1]
    assert relative_error(torch.stack(cached.logits, dim=1), logits) < 1e-6  # generate returns float32
    for way in ({"use_cache": False}, {"prefill_chunk_size": 3}, {"attention_mask": None}):
        output = model.generate(PROMPT, **{"attention_mask": MASKS} | options | way)
        assert torch.equal(output.sequences, cached.sequences), way
        assert relative_error(torch.stack(output.logits), torch.stack(cached.logits)) < 1e-6, way


@pytest.mark.parametrize("way", ["assisted", "prompt lookup", "continued"])
@pytest.mark.parametrize("fields", [{}, HYBRIDS["attention"]], ids=["toeplitz", "attention"])
def test_other_ways_to_generate_after_any_padding(fields, way):
    """The decoding methods that take one row."""
    model = lively_language_model(**fields)
    for row in (0, 4):
        ids, mask = PROMPT[row : row + 1], MASKS[row : row + 1]
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


@pytest.mark.parametrize("causal", [True, False])
def test_constant_positions_mean_nothing(causal):
    model, ids = seeded(TnnModel, tiny_config(causal=causal)), torch.arange(3, 14)[None]
    for position in (0, 5):
        constant = model(ids, position_ids=torch.full((1, 11), position)).last_hidden_state
        assert torch.equal(constant, model(ids).last_hidden_state)


def test_padding_reaches_nothing(variant):
    """NaN at padding changes neither outputs nor gradients, whatever the operator; nor does a row without tokens."""
    embeds = torch.randn(7, 11, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.cat([MASKS, torch.zeros(1, 11, dtype=torch.long)])
    for product in ("fused", "eager"):
        model, results = seeded(TnnModel, tiny_config(*variant, tno_implementation=product)), []
        for filler in (0.5, torch.nan):
            model.zero_grad()
            padded = embeds.masked_fill(mask[..., None] == 0, filler).requires_grad_()
            hidden = model(inputs_embeds=padded, attention_mask=mask).last_hidden_state
            assert hidden.isfinite().all()
            hidden[mask.bool()].square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            results.append([hidden[mask.bool()], padded.grad, *gradients])
        assert all(torch.equal(clean, poisoned) for clean, poisoned in zip(*results, strict=True))
        assert padded.grad[mask == 0].abs().max() < 1e-5 * padded.grad.abs().max()
        others = model(inputs_embeds=embeds[:6], attention_mask=MASKS).last_hidden_state
        assert relative_error(hidden[:6][MASKS.bool()], others[MASKS.bool()]) < 5e-6


def test_a_mask_for_all_rows():
    mask = MASKS[4:5]
    for head, causal in ((TnnForCausalLM, True), (TnnForMaskedLM, False), (TnnForSequenceClassification, False)):
        model = seeded(head, tiny_config(causal=causal, position_embedding="sinusoidal"))
        expected = model(PROMPT, attention_mask=mask.expand(6, -1)).logits
        assert torch.equal(model(PROMPT, attention_mask=mask).logits, expected)
    model, packed = seeded(TnnModel, tiny_config()), {"position_ids": torch.arange(11)[None] % 6}
    expected = model(PROMPT, attention_mask=mask.expand(6, -1), **packed).last_hidden_state
    assert torch.equal(model(PROMPT, attention_mask=mask, **packed).last_hidden_state, expected)


@pytest.mark.parametrize("product", ["fused", "eager"])
def test_a_batch_without_rows(variant, product):
    config = tiny_config(*variant, tno_implementation=product, eos_token_id=None)
    ids, mask = torch.zeros(0, 5, dtype=torch.long), torch.ones(0, 5, dtype=torch.long)
    model = seeded(TnnForCausalLM if config.causal else TnnForMaskedLM, config)
    output = model(ids, attention_mask=mask, labels=ids)
    assert output.logits.shape == (0, 5, 99) and output.loss.isnan()
    output.logits.sum().backward()
    if config.causal:
        assert model.generate(ids, attention_mask=mask, max_new_tokens=4).shape == (0, 5)
        cache = DynamicCache(config=config)
        for _ in range(3):
            assert model(ids, past_key_values=cache).logits.shape == (0, 5, 99)
            assert model(ids[:, :1], past_key_values=cache).logits.shape == (0, 1, 99)


def test_a_cache_is_for_causal_models():
    model = seeded(TnnForMaskedLM, tiny_config(causal=False))
    with pytest.raises(ValueError, match="`past_key_values` must be None for a model with causal=False"):
        model(IDS, past_key_values=DynamicCache(config=model.config))


def test_what_tokenizers_give_is_taken():
    model = seeded(TnnForCausalLM, tiny_config())
    assert torch.equal(model(IDS, token_type_ids=IDS, head_mask=None).logits, model(IDS.int()).logits)


V, TAPS = torch.ones(1, 4, 2), torch.ones(2, 7)


@pytest.mark.parametrize(
    "v, kernel, message",
    [
        (V.long(), TAPS, "`v` must hold real .*, got torch.int64"),
        (V, TAPS.bool(), "must hold real floating-point numbers, got torch.bool"),
        (V.cfloat(), TAPS, "`v` must hold real floating-point numbers, got torch.c"),
        ([[[1.0]]], TAPS, "`v` must be a tensor, got list"),
        (V, TAPS.to("meta"), "must be on the device of v, cpu, got meta"),
    ],
)
def test_refused_products(v, kernel, message):
    for matmul in (toeplitz_matmul, causal_toeplitz_matmul):
        with pytest.raises((TypeError, ValueError), match=message):
            matmul(v, kernel)


@pytest.mark.parametrize("head", [TnnForCausalLM, TnnForMaskedLM])
def test_ignore_index(head):
    model = seeded(head, tiny_config(causal=head is TnnForCausalLM))
    ids = torch.randint(3, 60, (2, 9))
    labels = ids.masked_fill(torch.arange(9) % 2 == 0, -100)
    other = ids.masked_fill(torch.arange(9) % 2 == 0, -7)
    assert model(ids, labels=other, ignore_index=-7).loss == model(ids, labels=labels).loss
    with pytest.raises(ValueError, match="Entries of `labels` must be in .*, got -7"):
        model(ids, labels=other)


def test_shift_labels():
    """As the labels, if these are shifted before; with them or without."""
    model = seeded(TnnForCausalLM, tiny_config())
    ids = torch.randint(3, 60, (2, 9))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    expected = model(ids, labels=ids).loss
    assert model(ids, shift_labels=shifted).loss == expected
    assert model(ids, labels=ids.flip(1), shift_labels=shifted).loss == expected
    with pytest.raises(ValueError, match="`shift_labels` must have shape"):
        model(ids, shift_labels=shifted[:, 1:])
    masked = seeded(TnnForMaskedLM, tiny_config(causal=False))
    with pytest.raises(TypeError, match="`shift_labels` is not an argument"):
        masked(ids, labels=ids, shift_labels=ids)
