"""Generation of the causal variants: every way to decode gives what the model without a cache gives."""

import pytest
import torch
from conftest import CAUSAL, relative_error, seeded, tiny_config

from modeling_tnn import TnnForCausalLM

EVERY_VARIANT = pytest.mark.parametrize("tno_type", CAUSAL)
PROMPT = torch.arange(14).view(2, 7) * 5 + 3


def language_model(tno_type):
    return seeded(TnnForCausalLM, tiny_config(tno_type, True, eos_token_id=None))


def greedy_by_hand(model, input_ids, steps):
    """The definition: the whole text through the model for every token, no cache."""
    for _ in range(steps):
        logits = model(input_ids, use_cache=False).logits
        input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


@EVERY_VARIANT
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy(tno_type, use_cache):
    model = language_model(tno_type)
    generated = model.generate(PROMPT, max_new_tokens=80, do_sample=False, use_cache=use_cache)
    assert torch.equal(generated, greedy_by_hand(model, PROMPT, 80))


@EVERY_VARIANT
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
        {"prefill_chunk_size": 3},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_ways_to_decode(tno_type, options):
    model = language_model(tno_type)
    torch.manual_seed(5)
    cached = model.generate(PROMPT, max_new_tokens=12, **{"do_sample": False} | options)
    torch.manual_seed(5)
    plain = {key: value for key, value in options.items() if key not in ("prefill_chunk_size", "cache_implementation")}
    uncached = model.generate(PROMPT, max_new_tokens=12, use_cache=False, **{"do_sample": False} | plain)
    assert torch.equal(cached, uncached)


@EVERY_VARIANT
def test_prompt_lookup(tno_type):
    model = language_model(tno_type)
    prompt = PROMPT[:1].repeat(1, 3)
    looked_up = model.generate(prompt, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(looked_up, greedy_by_hand(model, prompt, 20))


@EVERY_VARIANT
def test_left_padded_batch(tno_type):
    model = language_model(tno_type)
    short = PROMPT[1:, :4]
    batch = torch.cat([PROMPT[:1], torch.cat([torch.full((1, 3), 1), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :3] = 0
    generated = model.generate(batch, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(generated[:1], greedy_by_hand(model, PROMPT[:1], 20))
    assert torch.equal(generated[1:, 3:], greedy_by_hand(model, short, 20))


@EVERY_VARIANT
def test_continuing_from_a_returned_cache(tno_type):
    model = language_model(tno_type)
    text = torch.arange(60).view(2, 30)
    whole = model(text).logits
    cache, parts = None, []
    for chunk in text.split([1, 9, 1, 19], dim=1):
        outputs = model(chunk, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    assert cache.get_seq_length() == 30
    assert relative_error(torch.cat(parts, dim=1), whole) < 5e-6


def test_mask_must_cover_the_past():
    model = language_model("rpe")
    cache = model(PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"\(2, 8\)"):
        model(PROMPT[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_no_cache_unless_wanted():
    model = language_model("rpe")
    assert model(PROMPT, use_cache=False).past_key_values is None
    assert model(PROMPT).past_key_values is not None
