"""Decoding models with attention in some layers: one cache for both kinds of layer, in every way to use it.

Whole ways of `generate` are in `test_equalities.py`. Here are the passes of which they consist.
"""

import copy
import pickle

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from helpers.hybrids import HYBRIDS, ROPE
from helpers.models import exhaustive, lively_language_model, relative_error
from modeling_tnn.cache_tnn import memory_per_sequence

TEXT = torch.randint(2, 99, (2, 90), generator=torch.Generator().manual_seed(0))
EVERY_HYBRID = pytest.mark.parametrize("name", HYBRIDS)
RECORDED = ("sliding", "attention")


def model_of(name, tno_type="rpe", **fields):
    return lively_language_model(tno_type=tno_type, decay=0.9, **HYBRIDS[name] | fields)


def passes(model, text, sizes, mask=None, cache=None):
    """The logits of a text that comes in pieces."""
    cache, logits, end = DynamicCache(config=model.config) if cache is None else cache, [], 0
    end = cache.get_seq_length()
    for piece in text[:, end:].split(sizes, dim=1):
        end += piece.shape[1]
        given = None if mask is None else mask[:, :end]
        logits.append(model(piece, attention_mask=given, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def some_mask(side):
    mask = torch.ones_like(TEXT)
    mask[0, {"left": slice(0, 13), "inside": slice(20, 23), "right": slice(60, 90)}[side]] = 0
    return mask


@EVERY_HYBRID
@pytest.mark.parametrize(
    "tno_type, product, side",
    [
        ("rpe", "sdpa", None),
        ("rtf", "eager", "left"),
        *exhaustive(("rpe", "sdpa", "inside"), ("rpe", "sdpa", "right")),
    ],
)
def test_pieces_are_the_whole_text(name, tno_type, product, side):
    """Tokens one by one and chunks, shorter and longer than the window, with padding in the prompt."""
    model = model_of(name, tno_type)
    model.set_attn_implementation(product)
    mask = None if side is None else some_mask(side)
    with torch.no_grad():
        expected = model(TEXT, attention_mask=mask, use_cache=False).logits
        found = passes(model, TEXT, [30] + [1] * 9 + [3, 1, 20, 2, 1, 24], mask)
    real = slice(None) if mask is None else mask.bool()
    assert relative_error(found[real], expected[real]) < (1e-10 if product == "sdpa" else 1e-5)


@pytest.mark.parametrize("name", ["full", *RECORDED])
@pytest.mark.parametrize("start, removed", [(30, 7), (4, 1)])
def test_what_is_taken_back_was_never_there(name, start, removed):
    model, other = model_of(name), TEXT.flip(1)
    cache = DynamicCache(config=model.config)
    if name in RECORDED:
        cache.activate_past_recording()
    text = torch.cat([TEXT[:, :start], other[:, : 90 - start]], dim=1)
    with torch.no_grad():
        model(TEXT[:, :start], past_key_values=cache)
        model(TEXT[:, start : start + removed], past_key_values=cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == start
        found = passes(model, text, [1, 1, 88 - start], cache=cache)
        expected = model(text, use_cache=False).logits[:, start:]
    assert relative_error(found, expected) < 1e-10


def test_a_window_that_forgets_says_so():
    model = model_of("sliding")
    with torch.no_grad():
        cache = model(TEXT).past_key_values
    with pytest.raises(RuntimeError, match="Call `activate_past_recording` before `crop`"):
        cache.crop(-1)


def test_a_cache_taken_back_to_nothing_is_an_empty_one():
    model = model_of("full")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(TEXT, past_key_values=cache)
        cache.crop(-90)
        model.model.embed_tokens.weight.mul_(2)  # which a cache that holds tokens refuses
        assert torch.equal(model(TEXT, past_key_values=cache).logits, model(TEXT).logits)


@EVERY_HYBRID
def test_rows(name):
    model, rows = model_of(name), torch.tensor([1, 1, 0])
    with torch.no_grad():
        cache = model(TEXT[:, :40]).past_key_values
        with pytest.raises(ValueError, match="The input must have 2 sequences, as `past_key_values` has, got 3"):
            model(TEXT[rows, 40:], past_key_values=cache)
        cache = model(TEXT[:, :40]).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
        found = passes(model, TEXT[rows], [1, 49], cache=cache)
        assert relative_error(found, model(TEXT[rows]).logits[:, 40:]) < 1e-10


@pytest.mark.parametrize(
    "fields", [{"layer_types": ["full_attention", "toeplitz"]}, {"layer_types": ["sliding_attention"] * 2}]
)
def test_a_cache_of_another_model(fields):
    cache = model_of("full")(TEXT).past_key_values
    with pytest.raises(ValueError, match="`past_key_values` must be a cache for TNNs"):
        model_of("sliding", **fields)(TEXT, past_key_values=cache)


def test_memory():
    """Of a window, as many tokens as it sees; of full attention, all."""
    heads = 2 * 2 * 10 * 8  # keys and values of 2 heads of 10 numbers in float64
    sizes = {}
    for kind in ("full_attention", "sliding_attention"):
        model = model_of("attention", layer_types=[kind] * 2)
        sizes[kind] = memory_per_sequence(model(TEXT).past_key_values)
    assert sizes == {"full_attention": 2 * 90 * heads, "sliding_attention": 2 * 4 * heads}


def compiling() -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless a test asks
    return config


# A window makes transformers' static cache count in Python until it is full: a graph before, and one after.
OTHERS = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("full", False, 2), ("sliding", False, 3))]


@pytest.mark.parametrize("name, rope, graphs", [("full", True, 2), ("attention", True, 3), *OTHERS])
def test_compiled_steps(name, rope, graphs):
    """Tokens after padding on the left and without padding; a few graphs for all of them."""
    torch._dynamo.reset()
    counters.clear()
    model, config = model_of(name, rope_parameters=ROPE if rope else None), compiling()
    for length, pads in ((11, 4), (22, 0)):
        prompt, mask = TEXT[:, :length], torch.ones(2, length, dtype=torch.long)
        mask[0, :pads] = 0
        options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
        expected = model.generate(prompt, **options)
        static = options | {"cache_implementation": "static"}
        assert torch.equal(model.generate(prompt, compile_config=config, **static), expected)
        assert counters["stats"]["unique_graphs"] <= graphs
        assert torch.equal(model.generate(prompt, **static), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["full", pytest.param("attention", marks=pytest.mark.exhaustive)])
def test_compiled_steps_among_others(name):
    """Chunks, changed rows, copies and a saved cache between compiled steps."""
    torch._dynamo.reset()
    model = model_of(name)
    compiled = torch.compile(model.__call__, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=90)

    @torch.no_grad()
    def check(cache, text, start, end):
        expected = model(text[:, :end], use_cache=False).logits
        for position in range(start, end):
            given = {"next_sequence_length": 1, "past_key_values": cache, "use_cache": True}
            inputs = model.prepare_inputs_for_generation(text[:, : position + 1], **given)
            assert relative_error(compiled(**inputs).logits, expected[:, position : position + 1]) < 1e-9

    with torch.no_grad():
        model(TEXT[:, :9], past_key_values=cache)
        check(cache, TEXT, 9, 20)
        model(TEXT[:, 20:31], past_key_values=cache)
        model(TEXT[:, 31:32], past_key_values=cache)
    check(cache, TEXT, 32, 40)
    cache.reorder_cache(torch.tensor([1, 0]))
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        check(twin, TEXT.flip(0), 40, 44)
    torch._dynamo.reset()


@EVERY_HYBRID
def test_static_steps_after_beams(name):
    model, options = model_of(name), {"num_beams": 3, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(TEXT[:, :20], **options)
    assert torch.equal(model.generate(TEXT[:, :20], cache_implementation="static", **options), expected)


@pytest.mark.skipif(transformers.__version__ < "5.23", reason="crops layers of attention that have seen nothing")
@EVERY_HYBRID
def test_early_exit(name):
    model = model_of(name)
    expected = model.generate(TEXT[:1, :20], max_new_tokens=12, do_sample=False)
    found = model.generate(TEXT[:1, :20], max_new_tokens=12, do_sample=False, assistant_early_exit=1)
    assert torch.equal(found, expected) and model.config.num_hidden_layers == 2
