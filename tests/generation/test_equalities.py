"""Decoding with a cache: every kind of causal model keeps the promises of `helpers/caches.py`."""

import pytest
import torch
import transformers

from helpers.caches import MODELS, CacheTests, generate, model_of, text_of


class TestEveryModel(CacheTests):
    kinds = MODELS
    few = ("rpe-medium-decay", "hyena", "sliding")


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


def test_fewer_layers():
    """`assistant_early_exit` runs the same computation as a model with fewer layers."""
    model, text = model_of("rpe", num_hidden_layers=3), text_of(40)
    model.config.num_hidden_layers = 2
    outputs = model(text, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3 and len(outputs.past_key_values) == 2
    shorter = model_of("rpe", num_hidden_layers=2)
    shorter.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(outputs.logits, shorter(text).logits)
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="must be a cache for TNNs of 3 layers.*, got DynamicCache of 2"):
        model(text, past_key_values=outputs.past_key_values)
    with pytest.raises(ValueError, match=r"`num_hidden_layers` must be in \[1, 1,024\], got 0"):
        generate(model, text[:1], 3, assistant_early_exit=0)
