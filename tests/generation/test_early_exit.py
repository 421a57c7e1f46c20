"""Self-speculative decoding: the first layers of a model propose tokens, all of them decide."""

import pytest
import torch

from helpers.cache_models import EVERY_MODEL, TEXT, model_of


@EVERY_MODEL
@pytest.mark.parametrize("length", [1, 40])
def test_early_exit_is_greedy(name, length):
    """The assistant is the first layers of the model itself."""
    model, prompt = model_of(name, num_hidden_layers=3), TEXT[:1, :length]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **options)
    for layers in (1, 2, 9):
        assert torch.equal(model.generate(prompt, assistant_early_exit=layers, **options), expected)
        assert model.config.num_hidden_layers == 3
    assert torch.equal(model.generate(prompt, **options), expected)


def test_fewer_layers():
    """`assistant_early_exit` runs the same computation as a model with fewer layers."""
    model = model_of("rpe", num_hidden_layers=3)
    model.config.num_hidden_layers = 2
    outputs = model(TEXT, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3 and len(outputs.past_key_values) == 2
    shorter = model_of("rpe", num_hidden_layers=2)
    shorter.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(outputs.logits, shorter(TEXT).logits)
    model.config.num_hidden_layers = 3
    with pytest.raises(
        ValueError, match="`past_key_values` must be a cache for TNNs of 3 layers.*, got DynamicCache of 2"
    ):
        model(TEXT, past_key_values=outputs.past_key_values)
    with pytest.raises(ValueError, match=r"`num_hidden_layers` must be in \[1, 1,024\], got 0"):
        model.generate(TEXT[:1], assistant_early_exit=0, max_new_tokens=3)
