"""Whole models: initialisation, losses of Trainer, precision, inputs of every kind, equal numbers from equal seeds.

Heads are in `test_heads.py`, gates in `helpers/products.py`.
"""

import pytest
import torch
from transformers import DynamicCache, Trainer, TrainingArguments

from helpers.hybrids import HYBRIDS
from helpers.models import CAUSAL, lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel

LANGUAGE_MODELS = {True: TnnForCausalLM, False: TnnForMaskedLM}


def batch(length=19, rows=3) -> dict[str, torch.Tensor]:
    """Ids and a mask with padding on the right of the second row."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, -length // 3 :] = 0
    return {"input_ids": torch.randint(99, (rows, length), generator=generator), "attention_mask": mask}


def labels() -> torch.Tensor:
    return batch()["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)


def language_model(variant=("rpe", True), **fields):
    return seeded(LANGUAGE_MODELS[variant[1]], tiny_config(*variant, **fields))


def test_padding_tokens_in_the_loss_have_ordinary_gradients():
    """The last padding token on the left predicts the first real one."""
    input_ids = torch.cat([torch.full((2, 5), 1), batch(rows=2)["input_ids"]], dim=1)
    mask = (torch.arange(24) >= 5).long().expand(2, -1)
    for fields in ({"initializer": "torch"}, {"initializer": "normal"}, {"norm_position": "post"}):
        model = language_model(hidden_dropout_prob=0.0, **fields)
        model(input_ids, attention_mask=mask, labels=input_ids.masked_fill(mask == 0, -100)).loss.backward()
        assert torch.nn.utils.get_total_norm(parameter.grad for parameter in model.parameters()) < 100


def test_label_smoothing_of_trainer(tmp_path):
    """The loss of a causal model is that of the next tokens, smoothed or not; padding has no part in it."""
    model = language_model()
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.2, use_cpu=True, report_to="none"))
    loss = trainer.compute_loss(model, batch() | {"labels": labels()})
    scores = model(**batch()).logits[:, :-1].log_softmax(dim=-1)
    real, targets = labels()[:, 1:] != -100, labels()[:, 1:].clamp(min=0)
    likelihood = scores.gather(-1, targets[..., None])[..., 0][real].mean()
    torch.testing.assert_close(loss, -0.8 * likelihood - 0.2 * scores[real].mean())


def test_logits_to_keep():
    model = language_model()
    every = model(**batch()).logits
    for kept, positions in ((1, [-1]), (5, slice(-5, None)), (torch.tensor([0, 7]), [0, 7])):
        torch.testing.assert_close(model(**batch(), logits_to_keep=kept).logits, every[:, positions])


@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(tied):
    for causal, fields in ((True, {}), (False, {}), (True, HYBRIDS["full"])):
        model = language_model(("rpe", causal), tie_word_embeddings=tied, **fields)
        before = model(**batch()).logits
        model.resize_token_embeddings(120)
        after = model(**batch()).logits
        assert after.shape[-1] == model.config.vocab_size == 120
        torch.testing.assert_close(after[..., :99], before)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model(torch.tensor([[119]]))


@pytest.mark.parametrize(
    "initializer, deviation", [("torch", 32**-0.5), ("normal", 0.05), ("small_embeddings", 32**-0.75)]
)
def test_initialisation(initializer, deviation):
    config = tiny_config("rpe", False, initializer=initializer, initializer_range=0.05, vocab_size=5000)
    model = seeded(TnnForMaskedLM, config)
    embeddings, linear = model.model.embed_tokens.weight, model.model.layers[0].mixer.u_proj
    assert embeddings.std().item() == pytest.approx(deviation, rel=0.02)
    bound = 32**-0.5
    assert not model.lm_head.bias.any()
    if initializer == "normal":
        assert linear.weight.std().item() == pytest.approx(0.05, rel=0.1) and linear.bias.abs().max() == 0
    else:
        assert bound * 0.95 < linear.weight.abs().max() <= bound and linear.bias.abs().max() > 0


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


@pytest.mark.parametrize("fields", [{}, {"decay": None}, {"tno_type": "rtf"}, HYBRIDS["full"], HYBRIDS["attention"]])
def test_generation_after_any_padding(fields):
    """Cached, uncached and in chunks; transformers infers the mask from pad tokens where it is not given."""
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


@pytest.mark.parametrize("fields", [{}, HYBRIDS["attention"]], ids=["toeplitz", "attention"])
def test_other_ways_to_generate_after_any_padding(fields):
    """The decoding methods that take one row: a draft of a model or of the prompt, and a text that is continued."""
    model = lively_language_model(**fields)
    for row in (0, 4):
        ids, mask = PROMPT[row : row + 1], MASKS[row : row + 1]
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
        expected = model.generate(ids, **options)
        for way in ({"assistant_model": lively_language_model(tno_type="rtf")}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(model.generate(ids, **options, **way), expected)
        first = model.generate(ids, **options | {"max_new_tokens": 5, "return_dict_in_generate": True})
        options |= {"attention_mask": torch.nn.functional.pad(mask, (0, 5), value=1), "max_new_tokens": 7}
        assert torch.equal(model.generate(first.sequences, past_key_values=first.past_key_values, **options), expected)


def test_a_mask_for_all_rows():
    mask = MASKS[4:5]
    for head, causal in ((TnnForCausalLM, True), (TnnForMaskedLM, False), (TnnForSequenceClassification, False)):
        model = seeded(head, tiny_config(causal=causal, position_embedding="sinusoidal"))
        expected = model(PROMPT, attention_mask=mask.expand(6, -1)).logits
        assert torch.equal(model(PROMPT, attention_mask=mask).logits, expected)
    model, packed = seeded(TnnModel, tiny_config()), {"position_ids": torch.arange(11)[None] % 6}
    expected = model(PROMPT, attention_mask=mask.expand(6, -1), **packed).last_hidden_state
    assert torch.equal(model(PROMPT, attention_mask=mask, **packed).last_hidden_state, expected)


def test_a_batch_without_rows(variant):
    ids, mask = torch.zeros(0, 5, dtype=torch.long), torch.ones(0, 5, dtype=torch.long)
    for product in ("eager", "fused"):
        config = tiny_config(*variant, tno_implementation=product, eos_token_id=None)
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


def test_what_is_taken_and_refused():
    """What tokenizers give, constant positions and `ignore_index` are; a cache of a masked model is not."""
    ids = torch.randint(3, 60, (2, 9))
    for head in (TnnForCausalLM, TnnForMaskedLM):
        model = seeded(head, tiny_config(causal=head is TnnForCausalLM))
        expected = model(ids).logits
        assert torch.equal(model(ids.int(), token_type_ids=ids, head_mask=None).logits, expected)
        for position in (0, 5):
            assert torch.equal(model(ids, position_ids=torch.full((1, 9), position)).logits, expected)
        labels, other = (ids.masked_fill(torch.arange(9) % 2 == 0, ignored) for ignored in (-100, -7))
        assert model(ids, labels=other, ignore_index=-7).loss == model(ids, labels=labels).loss
        with pytest.raises(ValueError, match="Entries of `labels` must be in .*, got -7"):
            model(ids, labels=other)
    with pytest.raises(ValueError, match="`past_key_values` must be None for a model with causal=False"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(TypeError, match="`shift_labels` is not an argument"):
        model(ids, labels=ids, shift_labels=ids)


def test_shift_labels():
    """As the labels, if these are shifted before; with them or without."""
    model, ids = seeded(TnnForCausalLM, tiny_config()), torch.randint(3, 60, (2, 9))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    expected = model(ids, labels=ids).loss
    for labels in (None, ids.flip(1)):
        assert model(ids, labels=labels, shift_labels=shifted).loss == expected
    with pytest.raises(ValueError, match="`shift_labels` must have shape"):
        model(ids, shift_labels=shifted[:, 1:])


@pytest.fixture
def deterministic():
    """PyTorch's own check: operations without a deterministic form raise, and fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def test_forward_and_backward(variant, deterministic):
    for product, length in (("fused", 600), ("eager", 17)):
        ids, results = torch.randint(99, (2, length), generator=torch.Generator().manual_seed(0)), []
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        for _ in range(2):
            model = seeded(TnnModel, tiny_config(*variant, tno_implementation=product)).train()
            hidden = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            hidden.square().mean().backward()
            results.append([hidden, *(p.grad for p in model.parameters() if p.grad is not None)])
        for first, second in zip(*results, strict=True):
            assert first.isfinite().all() and torch.equal(first, second)


def test_generation(deterministic):
    for tno_type in CAUSAL:
        texts = []
        for _ in range(2):
            model = seeded(TnnForCausalLM, tiny_config(tno_type, eos_token_id=None))
            texts.append(model.generate(torch.arange(2, 9)[None], max_new_tokens=20, do_sample=True, num_beams=2))
        assert torch.equal(*texts), tno_type
