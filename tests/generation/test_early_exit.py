"""Self-speculative decoding: the first layers of a model propose tokens, all of them decide."""

from concurrent.futures import ThreadPoolExecutor

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


@EVERY_MODEL
def test_early_exit_that_breaks_off(name, monkeypatch):
    """transformers lowers the number of layers, and does not restore it after an error: not that of the model."""
    model, prompt = model_of(name, num_hidden_layers=3), TEXT[:1, :20]
    expected, logits = model.generate(prompt, max_new_tokens=9), model(prompt).logits
    forward, calls = model.model.layers[0].mixer.forward, []

    def interrupted(*args):
        calls.append(model.config.num_hidden_layers)
        return forward(*args) if len(calls) < 5 else 1 / 0

    monkeypatch.setattr(model.model.layers[0].mixer, "forward", interrupted)
    with pytest.raises(ZeroDivisionError):
        model.generate(prompt, max_new_tokens=9, assistant_early_exit=2)
    assert set(calls) == {3}
    monkeypatch.undo()
    assert torch.equal(model(prompt).logits, logits)
    assert torch.equal(model.generate(prompt, max_new_tokens=9), expected)


@pytest.mark.parametrize("name", ["rpe", "rtf"])
def test_early_exit_beside_other_threads(name):
    """While an assistant proposes, all else in the process uses the whole model."""
    model, prompt = model_of(name, num_hidden_layers=3), TEXT[:1, :20]
    expected, logits = model.generate(prompt, max_new_tokens=12), model(prompt).logits
    layers, options = [], {"max_new_tokens": 12, "assistant_early_exit": 2}

    def look(*args):
        layers.append(model.config.num_hidden_layers)

    with model.model.layers[0].register_forward_hook(look), ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(model.generate, prompt, **options) for _ in range(3)]
        whole = [model(prompt).logits for _ in range(9)]
        assert all(torch.equal(run.result(), expected) for run in runs)
    assert set(layers) == {3} and all(torch.equal(one, logits) for one in [*whole, model(prompt).logits])


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
