"""Gradients with a cache: those of the call that fills it, and an error for those of a later call."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from helpers.cache_models import TEXT, WITH_HYBRIDS, model_of
from helpers.models import relative_error


def gradients(model, logits):
    return torch.autograd.grad(logits.logsumexp(-1).mean(), list(model.parameters()))


@WITH_HYBRIDS
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_call_that_fills_a_cache_has_the_gradients_of_no_cache(name, kind):
    model = model_of(name)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=200)
    found = gradients(model, model(TEXT, past_key_values=cache).logits)
    expected = gradients(model, model(TEXT, use_cache=False).logits)
    assert all(relative_error(a, e) < 1e-10 for a, e in zip(found, expected, strict=True))


@WITH_HYBRIDS
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_continued_cache_has_the_same_logits_with_gradients_and_refuses_a_backward_pass(name, kind):
    model = model_of(name)
    caches = [
        DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=200) for _ in range(2)
    ]
    for chunk in TEXT.split([30] + [1] * 40 + [90], dim=1):
        with torch.no_grad():
            expected = model(chunk, past_key_values=caches[0]).logits
        logits = model(chunk, past_key_values=caches[1]).logits
        assert relative_error(logits, expected) < 1e-12
    with pytest.raises(RuntimeError, match="continues a cache has no gradients.*through an empty cache or without"):
        logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.model.embed_tokens.parameters())


@WITH_HYBRIDS
def test_a_kernel_alone_gets_no_wrong_gradients_from_a_continued_cache(name):
    """With all other weights frozen only the operator, or the keys of attention, need gradients."""
    model = model_of(name).requires_grad_(False)
    cache = model(TEXT[:, :30]).past_key_values
    mixers = [getattr(layer.mixer, "tno", None) or layer.attention.k_proj for layer in model.model.layers]
    for mixer in mixers:
        mixer.requires_grad_()
    with pytest.raises(RuntimeError, match="continues a cache has no gradients"):
        model(TEXT[:, 30:40], past_key_values=cache).logits.sum().backward()


@pytest.mark.slow  # the compiler breaks the graph at each layer
def test_a_compiled_pass_refuses_too():
    model = model_of("rpe")
    cache = model(TEXT[:, :20]).past_key_values
    logits = torch.compile(model, backend="aot_eager")(TEXT[:, 20:40], past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="continues a cache has no gradients"):
        logits.sum().backward()
