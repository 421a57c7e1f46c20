"""Generation: every kind of causal model inherits the promises of `helpers/caches.py`."""

import inspect

import pytest
import torch
import transformers
from accelerate import cpu_offload
from transformers import DynamicCache
from transformers.generation import stopping_criteria
from transformers.modeling_layers import GradientCheckpointingLayer

from helpers.caches import MODELS, CacheTests, generate, model_of, text_of
from helpers.models import checkpoint_activations, lively_language_model, relative_error

PROMPT = torch.arange(14).view(2, 7) * 5 + 3


def language_model(tno_type, **fields):
    return lively_language_model(tno_type=tno_type, **fields)


def test_there_is_a_cache_unless_nobody_wants_one_and_the_mask_covers_it():
    model = language_model("rpe")
    assert model(PROMPT, use_cache=False).past_key_values is None
    cache = model(PROMPT).past_key_values
    with pytest.raises(ValueError, match=r"\(2, 8\)"):
        model(PROMPT[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_new_tokens_after_a_cache_with_the_mask_of_the_whole_text():
    """The mask covers the cache too, as in transformers' documentation, or only the new tokens."""
    model, text = language_model("rpe", decay=0.9), torch.arange(32).view(2, 16) * 3 + 2
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(text, attention_mask=mask, **options)[:, 12:]
    with torch.no_grad():
        past = model(text[:, :12], attention_mask=mask[:, :12], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape .* = \(2, 16\), got \(2, 15\)"):
        model.generate(text[:, 12:], attention_mask=mask[:, 1:], past_key_values=past, **options)
    assert torch.equal(model.generate(text[:, 12:], attention_mask=mask, past_key_values=past, **options), expected)


def test_generation_and_caches_with_activation_checkpointing():
    """`generate`, which records no gradients, has a cache; with gradients one that holds text is refused."""
    model, lengths = language_model("rpe", decay=0.9, hidden_dropout_prob=0.0), []
    with torch.no_grad():
        past = model(PROMPT, use_cache=True).past_key_values
    expected = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    checkpoint_activations(model)
    model.train()
    model.model.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    assert torch.equal(model.generate(PROMPT, max_new_tokens=9, do_sample=False), expected)
    assert lengths == [7] + [1] * 8
    with pytest.raises(ValueError, match="`past_key_values` must be empty with gradient checkpointing, got tokens"):
        model(PROMPT, past_key_values=past)


# Older releases give no cache to a model in training, whether there are gradients or not.
KEEPS_CACHE = "is_grad_enabled" in inspect.getsource(GradientCheckpointingLayer)


def test_no_cache_is_filled_with_activation_checkpointing():
    """With gradients an empty cache stays empty, and none is returned; without, it has each token once."""
    model = language_model("rpe", decay=0.9, hidden_dropout_prob=0.0)
    expected = model(PROMPT, use_cache=False).logits
    checkpoint_activations(model)
    model.train()
    for differentiated in (True, False):
        for given in (None, DynamicCache(config=model.config)):
            with torch.set_grad_enabled(differentiated):
                outputs = model(PROMPT, past_key_values=given, use_cache=True)
            assert relative_error(outputs.logits, expected) < 1e-12
            if differentiated:
                outputs.logits.sum().backward()
                assert outputs[1:] == () and (given is None or given.get_seq_length() == 0)
            elif KEEPS_CACHE:
                assert outputs[1].get_seq_length() == 7 and given in (None, outputs[1])


def test_no_length_is_a_limit(monkeypatch):
    """Texts longer than `max_position_embeddings` are continued by 20 tokens as others are, without a warning."""
    model = language_model("rpe", max_position_embeddings=8)
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", pytest.fail)
    for length in (2, 7, 14):
        prompt = PROMPT.reshape(1, 14)[:, :length]
        assert model.generate(prompt, do_sample=False).shape[1] == length + 20
        assert model.generate(inputs_embeds=model.model.embed_tokens(prompt), do_sample=False).shape[1] == 20


@pytest.mark.parametrize("tno_type, implementation", [("rtf", "static"), ("modal", None)])
def test_offloaded_weights(tno_type, implementation):
    """The weights of each module come to the device while it runs."""
    model = language_model(tno_type)
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(PROMPT, **options)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model.generate(PROMPT, cache_implementation=implementation, **options), expected)


class TestEveryModel(CacheTests):
    kinds = MODELS
    few = ("rpe-medium-decay", "sliding", "hyena")
    slow = ("rpe-learnable-decay", "rpe-no-decay", "fd", "s4d", "modal", "explicit", "implicit", "s4", "sinusoidal")


@pytest.mark.slow
def test_long_drafts():
    """Assistants whose drafts are longer than what their caches can take back otherwise."""
    model, prompt = model_of("rpe"), text_of(7, 1)
    for drafting in map(model_of, ("rtf", "sliding")):
        settings = {"num_assistant_tokens": 90, "num_assistant_tokens_schedule": "constant"}
        drafting.generation_config.update(assistant_confidence_threshold=0.0, **settings)
        few = [lambda ids, scores: torch.tensor([ids.shape[1] >= 11])]
        found = generate(model, prompt, 100, assistant_model=drafting, stopping_criteria=few)
        assert found.shape[1] >= 11 and torch.equal(found, generate(model, prompt, found.shape[1] - 7))


LATER = pytest.mark.skipif(transformers.__version__ < "5.23", reason="crops empty layers of attention")


@pytest.mark.parametrize("name", ["rpe", pytest.param("hybrid", marks=LATER)])
def test_early_exit_is_greedy(name):
    """The assistant is the first layers of the model itself."""
    model, prompt = model_of(name), text_of(40, 1)
    before = model.config.num_hidden_layers
    expected = generate(model, prompt, 12)
    for layers in (1, 9) if name != "hybrid" else (1,):
        assert torch.equal(generate(model, prompt, 12, assistant_early_exit=layers), expected)
        assert model.config.num_hidden_layers == before
    assert torch.equal(generate(model, prompt, 12), expected)
