"""The table of exact equalities: every way to decode gives the tokens of the model without a cache.

Each test runs over every kind of causal model and over random prompts. Tokens are compared in float64, where no tie
can be broken by rounding; logits in float32 to 1e-4.
"""

import pytest
import torch
from transformers import DynamicCache

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import exhaustive, lively_language_model, relative_error

MODELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.8, "learnable_decay": True},
    "rpe-no-decay": {"tno_type": "rpe", "decay": 1.0},
    "fd": {"tno_type": "fd"},
    "rtf": {"tno_type": "rtf"},
    "s4d": {"tno_type": "s4d"},
    "rtf-odd-length": {"tno_type": "rtf", "max_position_embeddings": 63},
    "explicit": {"tno_type": "explicit"},
    "converted": {"tno_type": "rpe", "decay": 0.9},
    "hyena": {"tno_type": "rpe", "decay": 0.9} | MIXED["hyena"],
    "hyena-rtf": {"tno_type": "rtf"} | MIXED["hyena"] | HYBRIDS["sliding"],
    "hyena-converted": {"tno_type": "rpe", "decay": 0.9} | MIXED["hyena"],
    "s4": {"tno_type": "rtf"} | MIXED["s4"],
    "hybrid": {"tno_type": "rpe", "decay": 0.9} | HYBRIDS["full"],
    "hybrid-sliding": {"tno_type": "rtf"} | HYBRIDS["sliding"],
    "attention": HYBRIDS["attention"],
}
# Lengths of prompts, and how many tokens to generate after each.
PROMPTS = [(7, 40), (300, 40), *exhaustive((1, 40), (2, 31), (64, 23))]
RARE = ("rpe-learnable-decay", "rtf-odd-length", "attention", "hyena-rtf", "hyena-converted", "s4")
EVERY_MODEL = pytest.mark.parametrize("name", [*(name for name in MODELS if name not in RARE), *exhaustive(*RARE)])
EVERY_PROMPT = pytest.mark.parametrize("length, new", PROMPTS)


def model_of(name):
    model = lively_language_model(**MODELS[name])
    return model.to_recurrent(order=8, window=4)[0] if "converted" in name else model


def prompt_of(length, rows=2):
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(length))


def generate(model, prompt, new, **options):
    """Greedy unless the options say otherwise; from the same random state every time."""
    torch.manual_seed(7)
    return model.generate(prompt, max_new_tokens=new, **{"do_sample": False} | options)


@EVERY_MODEL
def test_texts_are_not_trivial(name):
    """Equal tokens say something only if the text depends on its past."""
    texts = generate(model_of(name), prompt_of(7), 40)[:, 7:].tolist()
    assert min(len(set(text)) for text in texts) > 5 and texts[0] != texts[1]


@EVERY_MODEL
@EVERY_PROMPT
def test_cached_is_uncached(name, length, new):
    model, prompt = model_of(name), prompt_of(length)
    by_hand = prompt
    for _ in range(new):
        logits = model(by_hand, use_cache=False).logits
        by_hand = torch.cat([by_hand, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, prompt, new), by_hand)
    assert torch.equal(generate(model, prompt, new, use_cache=False), by_hand)
    assert torch.equal(generate(model, prompt, new, cache_implementation="static"), by_hand)


@EVERY_MODEL
@EVERY_PROMPT
def test_float32_logits(name, length, new):
    model, prompt = model_of(name).float(), prompt_of(length)
    options = {"output_logits": True, "return_dict_in_generate": True}
    output = generate(model, prompt, new, **options)
    uncached = model(output.sequences[:, :-1], use_cache=False).logits[:, length - 1 :]
    assert relative_error(torch.stack(output.logits, dim=1), uncached) < 1e-4


@EVERY_MODEL
@EVERY_PROMPT
def test_left_padded_batch_is_one_by_one(name, length, new):
    model = model_of(name)
    texts = [prompt_of(length, 1), prompt_of(max(1, length // 3), 1), prompt_of(max(1, length - 1), 1)]
    padding = [length - text.shape[1] for text in texts]
    batch = torch.cat(
        [torch.cat([torch.ones(1, n).long(), text], dim=1) for text, n in zip(texts, padding, strict=True)]
    )
    mask = torch.stack([torch.arange(length) >= n for n in padding]).long()
    generated = generate(model, batch, new, attention_mask=mask)
    for row, (text, n) in enumerate(zip(texts, padding, strict=True)):
        assert torch.equal(generated[row : row + 1, n:], generate(model, text, new))


@EVERY_MODEL
@EVERY_PROMPT
@pytest.mark.parametrize("size", [5, 128, *exhaustive(1)])
def test_chunked_prefill_is_one_shot(name, length, new, size):
    model, prompt = model_of(name), prompt_of(length)
    assert torch.equal(generate(model, prompt, new, prefill_chunk_size=size), generate(model, prompt, new))


@EVERY_MODEL
@EVERY_PROMPT
def test_chunked_prefill_of_a_padded_batch(name, length, new):
    model, prompt = model_of(name), prompt_of(length)
    mask = torch.ones_like(prompt)
    mask[0, : length // 2] = 0
    chunked = generate(model, prompt, new, attention_mask=mask, prefill_chunk_size=3)
    assert torch.equal(chunked, generate(model, prompt, new, attention_mask=mask))


@EVERY_MODEL
@EVERY_PROMPT
def test_continuing_is_one_run(name, length, new):
    model, prompt = model_of(name), prompt_of(length)
    first = generate(model, prompt, new // 2, return_dict_in_generate=True)
    options = {"past_key_values": first.past_key_values}
    options["attention_mask"] = torch.ones_like(first.sequences)  # the text may have the padding token in it
    more = generate(model, first.sequences, new - new // 2, **options)
    assert torch.equal(more, generate(model, prompt, new))


@EVERY_MODEL
@EVERY_PROMPT
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, *exhaustive({"num_return_sequences": 3})], ids=str)
def test_beams_cached_is_uncached(name, length, new, options):
    model, prompt = model_of(name), prompt_of(length)
    options = options | {"num_beams": 3}
    new = min(new, 12) if length == 300 else new
    assert torch.equal(
        generate(model, prompt, new, **options), generate(model, prompt, new, use_cache=False, **options)
    )


@EVERY_MODEL
@EVERY_PROMPT
def test_prompt_lookup_is_greedy(name, length, new):
    model, prompt = model_of(name), prompt_of(length, 1).repeat(1, 2)
    looked_up = generate(model, prompt, new, prompt_lookup_num_tokens=4)
    assert torch.equal(looked_up, generate(model, prompt, new))


@EVERY_MODEL
@EVERY_PROMPT
def test_assisted_is_greedy(name, length, new):
    """The assistant is another TNN, whose state is cropped too."""
    model, prompt = model_of(name), prompt_of(length, 1)
    assistant = model_of("rtf" if name != "rtf" else "rpe")
    assert torch.equal(generate(model, prompt, new, assistant_model=assistant), generate(model, prompt, new))


@pytest.mark.parametrize("assistant", ["rtf", "s4d", "explicit", "hyena", "hybrid-sliding", *exhaustive("rpe", "fd")])
def test_long_drafts(assistant):
    """An assistant whose drafts are longer than what its cache can take back otherwise."""
    model, prompt, drafting = model_of("rpe"), prompt_of(7, 1), model_of(assistant)
    settings = {"num_assistant_tokens": 90, "num_assistant_tokens_schedule": "constant"}
    drafting.generation_config.update(assistant_confidence_threshold=0.0, **settings)
    assert torch.equal(generate(model, prompt, 100, assistant_model=drafting), generate(model, prompt, 100))


@EVERY_MODEL
@EVERY_PROMPT
def test_sampling_with_a_seed(name, length, new):
    model, prompt = model_of(name), prompt_of(length)
    options = {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3}
    assert torch.equal(
        generate(model, prompt, new, **options), generate(model, prompt, new, use_cache=False, **options)
    )


@EVERY_MODEL
def test_one_prompt_for_many_continuations(name):
    """The state after a prompt, repeated along the batch, and copied for each continuation."""
    model, prompt = model_of(name), prompt_of(40, 1)
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    texts = torch.cat([prompt.repeat(3, 1), prompt_of(5, 3)], dim=1)
    together = generate(model, texts, 20, past_key_values=cache)
    for row in range(3):
        assert torch.equal(together[row : row + 1], generate(model, texts[row : row + 1], 20))
