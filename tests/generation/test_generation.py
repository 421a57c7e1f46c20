"""Generation as users meet it: pipelines, streamers, inputs_embeds, lengths beyond the trained one."""

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer, pipeline

from helpers.models import CAUSAL, checkpoint_activations, lively_language_model, relative_error
from helpers.scripts import SENTENCES
from tnn_scripts.data.text import train_tokenizer

EVERY_VARIANT = pytest.mark.parametrize("tno_type", CAUSAL)
PROMPT = torch.arange(14).view(2, 7) * 5 + 3


def language_model(tno_type, **fields):
    return lively_language_model(tno_type=tno_type, **fields)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """99 words, w0 to w98."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "w0", "pad_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


@EVERY_VARIANT
def test_pipeline(tno_type):
    """Batched, with prompts of different lengths: the same texts as one by one."""
    generator = pipeline("text-generation", model=language_model(tno_type), tokenizer=word_tokenizer())
    prompts = ["w5 w6 w7 w8", "w9", "w10 w11 w12 w13 w14 w15 w16"]
    options = {"max_new_tokens": 15, "do_sample": False}
    batched = generator(prompts, batch_size=3, **options)
    for prompt, result in zip(prompts, batched, strict=True):
        alone = generator(prompt, **options)
        assert result == alone
        assert alone[0]["generated_text"].startswith(prompt)
        assert alone[0]["generated_text"].count("w") > prompt.count("w") + 10


def test_streamer(capsys):
    model, tokenizer = language_model("rpe"), word_tokenizer()
    inputs = tokenizer("w5 w6", return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"], max_new_tokens=10, do_sample=False, streamer=TextStreamer(tokenizer)
    )
    assert capsys.readouterr().out.split() == tokenizer.decode(output[0]).split()


@EVERY_VARIANT
def test_inputs_embeds(tno_type):
    model = language_model(tno_type)
    embeds = model.get_input_embeddings()(PROMPT)
    from_embeds = model.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False)
    assert torch.equal(from_embeds, model.generate(PROMPT, max_new_tokens=10, do_sample=False)[:, 7:])


@EVERY_VARIANT
def test_beyond_the_trained_length(tno_type):
    """64 positions are trained; a text of 400 decodes as the model without a cache does."""
    model = language_model(tno_type)
    text = model.generate(PROMPT, max_new_tokens=400, do_sample=False)
    logits = model(text[:, :-1], use_cache=False).logits[:, 6:]
    assert torch.equal(logits.argmax(-1), text[:, 7:])


@EVERY_VARIANT
def test_chunks_of_any_length(tno_type):
    model = language_model(tno_type)
    text = torch.arange(60).view(2, 30)
    cache, parts = None, []
    for chunk in text.split([1, 9, 1, 19], dim=1):
        outputs = model(chunk, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    assert cache.get_seq_length() == 30
    assert relative_error(torch.cat(parts, dim=1), model(text).logits) < 1e-12


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tno_type, dtype):
    model = language_model(tno_type).to(dtype)
    options = {"max_new_tokens": 30, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(PROMPT, **options)
    uncached = model(output.sequences[:, :-1], use_cache=False).logits[:, 6:]
    assert relative_error(torch.stack(output.logits, dim=1), uncached) < 0.05


def test_mask_must_cover_the_past():
    model = language_model("rpe")
    cache = model(PROMPT, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"\(2, 8\)"):
        model(PROMPT[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_no_cache_unless_wanted():
    model = language_model("rpe")
    assert model(PROMPT, use_cache=False).past_key_values is None
    assert model(PROMPT).past_key_values is not None


@pytest.mark.parametrize("padded", [0, 3])
def test_new_tokens_after_a_cache_with_the_mask_of_the_whole_text(padded):
    """The mask covers the cache too, as in transformers' documentation, or only the new tokens."""
    model, text = language_model("rpe", decay=0.9), torch.arange(32).view(2, 16) * 3 + 2
    mask = torch.ones_like(text)
    mask[0, :padded] = 0
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(text, attention_mask=mask, **options)[:, 12:]
    with torch.no_grad():
        past = model(text[:, :12], attention_mask=mask[:, :12], use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"`attention_mask` must have shape .* = \(2, 4\), .*, or \(2, 16\) with the tokens"
    ):
        model.generate(text[:, 12:], attention_mask=mask[:, 1:], past_key_values=past, **options)
    assert torch.equal(model.generate(text[:, 12:], attention_mask=mask, past_key_values=past, **options), expected)


def test_generation_and_caches_with_activation_checkpointing():
    """Its layers get no cache: `generate` goes without one, and a cache that holds text is refused."""
    model = language_model("rpe", decay=0.9, hidden_dropout_prob=0.0)
    with torch.no_grad():
        past = model(PROMPT, use_cache=True).past_key_values
    expected = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    checkpoint_activations(model)
    model.train()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=9, do_sample=False), expected)
    with pytest.raises(ValueError, match="`past_key_values` must be empty with gradient checkpointing, got tokens"):
        model(PROMPT, past_key_values=past)


@pytest.mark.parametrize("differentiated", [True, False])
def test_no_cache_is_filled_with_activation_checkpointing(differentiated):
    """An empty cache stays empty, and none is returned: neither one without tokens nor one with each token twice."""
    model = language_model("rpe", decay=0.9, hidden_dropout_prob=0.0)
    expected = model(PROMPT, use_cache=False).logits
    checkpoint_activations(model)
    model.train()
    with torch.set_grad_enabled(differentiated):
        for given in (None, DynamicCache(config=model.config)):
            outputs = model(PROMPT, past_key_values=given, use_cache=True)
            if differentiated:
                outputs.logits.sum().backward()
            assert relative_error(outputs.logits, expected) < 1e-12 and outputs[1:] == ()
            assert given is None or given.get_seq_length() == 0


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("tno_type", CAUSAL)
def test_offloaded_weights(tno_type, implementation):
    """The weights of each module come to the device while it runs."""
    model = language_model(tno_type)
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(PROMPT, **options)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model.generate(PROMPT, cache_implementation=implementation, **options), expected)


def test_stop_strings():
    """transformers hands the tokenizer that they need on to every pass of the model."""
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    model, prompt = language_model("rpe", vocab_size=300), tokenizer("The quick", return_tensors="pt").input_ids
    options = {"max_new_tokens": 15, "do_sample": False}
    whole = model.generate(prompt, **options)
    text = tokenizer.decode(whole[0, prompt.shape[1] + 4])
    stopped = model.generate(prompt, stop_strings=[text], tokenizer=tokenizer, **options)
    assert stopped.shape[1] <= prompt.shape[1] + 5 and torch.equal(stopped, whole[:, : stopped.shape[1]])
