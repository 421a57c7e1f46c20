"""Compiled decoding with a static cache: one graph for all tokens, and the tokens of every other way to decode.

The tokens are compared in float64. `backend="eager"` records the same graph as the compiler gets and runs it as it is,
so that a recompilation or a break of the graph shows within a second. One test compiles for real.
"""

import copy
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from helpers.caches import TEXT, model_of, states_of
from helpers.hybrids import HYBRIDS
from helpers.models import exhaustive, relative_error
from modeling_tnn.cache_tnn import CACHE, max_crop

FIRST = ("rpe-medium-decay", "rtf", "converted")
SECOND = ("fd", "hyena")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SECOND]
REST = ("rpe", "rpe-no-decay", "s4d", "modal", "explicit")
EVERY_KIND = pytest.mark.parametrize("name", [*FIRST, *SLOW, *exhaustive(*REST)])
NEW = 300


def compiling(backend) -> CompileConfig:
    """One object for all calls of a test: transformers compiles again for another one."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless a test asks
    return config


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def generate(model, prompt, new, config=None, **options):
    if config is not None:
        options |= {"cache_implementation": "static", "compile_config": config}
    return model.generate(prompt, max_new_tokens=new, do_sample=False, **options)


class Steps:
    """Compiled steps of a text, as `generate` takes them."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.compiled = torch.compile(model.__call__, backend="eager", fullgraph=True)

    @torch.no_grad()
    def __call__(self, text, start, end):
        """The logits of the tokens start .. end - 1."""
        logits = []
        for position in range(start, end):
            inputs = self.model.prepare_inputs_for_generation(
                text[:, : position + 1], next_sequence_length=1, past_key_values=self.cache, use_cache=True
            )
            logits.append(self.compiled(**inputs).logits)
        return torch.cat(logits, dim=1)


def started(model, text, length, longest=NEW):
    cache = StaticCache(config=model.config, max_cache_len=longest)
    with torch.no_grad():
        model(text[:, :length], past_key_values=cache)
    return cache


@EVERY_KIND
def test_one_graph_and_the_same_tokens(name):
    """200 tokens after padding on the left; a text without padding, which has no mask; and padding again."""
    model, config = model_of(name), compiling("eager")
    for start, length, pads, new, graphs in ((0, 11, 4, 200, 1), (11, 22, 0, 60, 2), (40, 30, 7, 20, 2)):
        prompt, mask = TEXT[:, start : start + length], torch.ones(2, length, dtype=torch.long)
        mask[0, :pads] = 0
        expected = generate(model, prompt, new, attention_mask=mask)
        assert torch.equal(generate(model, prompt, new, config, attention_mask=mask), expected)
        assert counters["stats"]["unique_graphs"] <= graphs  # transformers 5.17 gives a mask to all texts


def recording(layouts: list, addresses: list):
    """A compiler that records the layouts of a graph's inputs in each call, and the addresses of those marked static.

    A CUDA graph copies the other inputs and is recorded again when any layout or static address changes.
    """

    def compiler(graph, examples):
        metas = [node.meta.get("tensor_dict", {}) for node in graph.graph.nodes if node.op == "placeholder"]
        marked = [meta.get("_dynamo_static_input_type") is not None for meta in metas]

        def run(*inputs):
            layouts.append(tuple((x.shape, x.stride(), x.dtype) for x in inputs))
            addresses.append({x.data_ptr() for x, is_static in zip(inputs, marked, strict=True) if is_static})
            return graph(*inputs)

        return run

    return compiler


def own_addresses(model, cache) -> set[int]:
    """Of the weights, and of all tensors that a step of a static cache has."""
    held = [*model.parameters(), *model.buffers()]
    for state in states_of(cache):
        held += [state.cursor, state.history.buffer, *state.constants, *state.tensors.values()]
    return {tensor.data_ptr() for tensor in held}


@pytest.mark.parametrize(
    ("name", "rows", "pads"),
    [
        ("sinusoidal", 1, 0),
        ("rtf", 3, 4),
        pytest.param("rpe-medium-decay", 1, 2, marks=pytest.mark.slow),
        pytest.param("rpe-medium-decay", 8, 0, marks=pytest.mark.slow),
    ],
)
def test_what_enters_a_compiled_step_stays_the_same(name, rows, pads, monkeypatch):
    """Shapes, strides and dtypes, over 150 tokens and two more texts, and the addresses of weights and states."""
    model, given, layouts, addresses = model_of(name), [], [], []
    config, prepare = compiling(recording(layouts, addresses)), model.prepare_inputs_for_generation

    def recorded(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        if inputs["input_ids"].shape[1] == 1 and inputs[CACHE].is_compileable:
            given.append({key: (x.shape, x.stride(), x.dtype) for key, x in inputs.items() if torch.is_tensor(x)})
        return inputs

    monkeypatch.setattr(model, "prepare_inputs_for_generation", recorded)
    texts, mask = TEXT.flatten()[: 3 * rows * 11].view(3, rows, 11), torch.ones(rows, 11, dtype=torch.long)
    mask[0, :pads] = 0
    for prompt, new in zip(texts, (150, 20, 20), strict=True):
        generated = generate(model, prompt, new, config, attention_mask=mask, return_dict_in_generate=True)
        assert torch.equal(generated.sequences, generate(model, prompt, new, attention_mask=mask))
        own = own_addresses(model, generated[CACHE])
        del generated
    assert counters["stats"]["unique_graphs"] == 1 and len(layouts) == len(given) == 150 + 40 - 3
    assert len(set(layouts)) == 1 and all(one == given[0] for one in given)
    assert all(one == addresses[0] for one in addresses)
    assert addresses[0] <= own and len(addresses[0]) == len(layouts[0]) - len(given[0])


def test_two_texts_at_once_have_places_of_their_own():
    """The state of a cache that a caller keeps is not written by the next text."""
    model = model_of("rpe-medium-decay")
    caches = [started(model, text, 9) for text in (TEXT, TEXT.flip(0))]
    for start, end in ((9, 30), (30, 60)):
        for cache, text in zip(caches, (TEXT, TEXT.flip(0)), strict=True):
            with torch.no_grad():
                expected = model(text, use_cache=False).logits[:, start:end]
            assert relative_error(Steps(model, cache)(text, start, end), expected) < 1e-9


@pytest.mark.parametrize("name, graphs", [("full", 2), ("attention", 3)])
def test_few_graphs_of_hybrids(name, graphs):
    """A window makes transformers' static cache count in Python until it is full: a graph before, and one after."""
    model, config = model_of("rpe", **HYBRIDS[name]), compiling("eager")
    for length, pads in ((11, 4), (22, 0)):
        prompt, mask = TEXT[:, :length], torch.ones(2, length, dtype=torch.long)
        mask[0, :pads] = 0
        expected = generate(model, prompt, 40, attention_mask=mask)
        assert torch.equal(generate(model, prompt, 40, config, attention_mask=mask), expected)
        assert counters["stats"]["unique_graphs"] <= graphs


@EVERY_KIND
def test_logits_after_a_long_prompt(name):
    """Longer than what `crop` may take back, so that each history gets another length."""
    model = model_of(name)
    text = torch.randint(2, 99, (2, 1350), generator=torch.Generator().manual_seed(3))
    cache = started(model, text, 1300, 1400)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[:, 1300:]
    assert relative_error(Steps(model, cache)(text, 1300, 1350), expected) < 1e-9


@pytest.mark.parametrize("name", [*FIRST, "hybrid", *SLOW, *exhaustive(*REST)])
def test_compiled_steps_among_others(name):
    """Steps, chunks, crops (of Toeplitz layers alone), changed rows and a saved cache between compiled steps."""
    model = model_of(name)
    cache = started(model, TEXT, 9)
    with torch.no_grad():
        expected = model(TEXT, use_cache=False).logits

        def check(logits, start, end):
            assert relative_error(logits, expected[:, start:end]) < 1e-9

        steps = Steps(model, cache)
        check(steps(TEXT, 9, 60), 9, 60)
        check(model(TEXT[:, 60:61], past_key_values=cache).logits, 60, 61)
        check(steps(TEXT, 61, 70), 61, 70)
        check(model(TEXT[:, 70:90], past_key_values=cache).logits, 70, 90)
        check(steps(TEXT, 90, 99), 90, 99)
        if name != "hybrid":
            steps(TEXT.flip(1), 99, 120)
            cache.crop(-21)
        check(steps(TEXT, 99, 140), 99, 140)
        cache.reorder_cache(torch.tensor([1, 0]))
        check(steps(TEXT.flip(0), 140, 145).flip(0), 140, 145)
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
            check(Steps(model, twin)(TEXT.flip(0), 145, 160).flip(0), 145, 160)


@pytest.mark.parametrize("name", FIRST)
def test_a_step_that_was_prepared_and_not_taken(name):
    model = model_of(name)
    cache = started(model, TEXT, 9)
    steps = Steps(model, cache)
    steps(TEXT, 9, 40)
    with torch.no_grad():
        expected = model(TEXT, use_cache=False).logits
        for position in (40, 41, 42, 43):
            given = {"next_sequence_length": 1, "past_key_values": cache, "use_cache": True}
            model.prepare_inputs_for_generation(TEXT[:, : position + 1], **given)
            if position == 41:
                logits = model(TEXT[:, 41:42], past_key_values=cache).logits
            elif position == 42:
                cache.reorder_cache(torch.arange(2))
                logits = steps(TEXT, 42, 43)
            else:
                logits = steps(TEXT, position, position + 1)
            assert relative_error(logits, expected[:, position : position + 1]) < 1e-9
        model.prepare_inputs_for_generation(TEXT[:, :45], **given)
        assert max_crop(cache.layers[0]) >= 20
        cache.crop(-3)
        assert cache.get_seq_length() == 41
        assert relative_error(steps(TEXT, 41, 60), expected[:, 41:60]) < 1e-9


@pytest.mark.parametrize("name", ["rpe-medium-decay", "rtf"])
def test_rows_that_change_places_at_every_token(name):
    model = model_of(name)
    cache = started(model, TEXT, 9)
    with torch.no_grad():
        expected = model(TEXT, use_cache=False).logits
    steps = Steps(model, cache)
    rows = torch.arange(2)
    for position in range(9, 100):
        logits = steps(TEXT[rows], position, position + 1)
        assert relative_error(logits, expected[rows, position : position + 1]) < 1e-9
        cache.reorder_cache(torch.tensor([1, 0]))
        rows = rows.flip(0)
    assert counters["stats"]["unique_graphs"] == 1


def test_only_static_caches_compile():
    model = model_of("rpe")
    assert StaticCache(config=model.config, max_cache_len=9).is_compileable
    assert not DynamicCache(config=model.config).is_compileable


@pytest.mark.parametrize("name", ["rpe", "rtf"])
def test_compiled_steps_of_a_new_cache_have_the_present_weights(name):
    """The places that steps read belong to the operator, and outlive a cache."""
    model, earlier = model_of(name), None
    for _ in range(2):
        cache = started(model, TEXT, 9)
        logits = Steps(model, cache)(TEXT, 9, 14)
        assert relative_error(logits, model(TEXT, use_cache=False).logits[:, 9:14]) < 1e-10
        assert earlier is None or relative_error(logits, earlier) > 1e-3
        earlier = logits
        with torch.no_grad():
            for parameter in model.model.layers[0].mixer.tno.parameters():
                parameter.mul_(1.1)


def test_compiled_steps_that_diverge_are_found():
    model = model_of("rtf", rtf_constraint=None, max_position_embeddings=100)
    with torch.no_grad():
        denominator = model.model.layers[1].mixer.tno.denominator
        denominator.zero_()
        denominator[:, 0] = -1.1
    cache = started(model, TEXT, 9)
    for layer in cache.layers:
        state = layer.states["tno"]
        layer.update(torch.zeros(2, 1, state.prompt.v.shape[2]).double(), None, state.recurrence.operator)
        state.history.buffer.fill_(torch.finfo(torch.float64).max)
    with pytest.raises(ValueError, match=r"Layer 1, channel \d+: a pole of radius 1.1"):
        Steps(model, cache)(TEXT, 10, 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpe-medium-decay", "rtf", "converted"])
def test_the_compiler(name):
    model = model_of(name)
    expected = generate(model, TEXT[:, :20], 200)
    assert torch.equal(generate(model, TEXT[:, :20], 200, compiling("inductor")), expected)


@pytest.mark.parametrize("length, new", [(1, 20), (150, 150), (600, 20)])
def test_a_static_cache_is_no_longer_than_its_text(length, new):
    """The kernel of a slow decay has 20,000 taps, and the text has none so far away."""
    model, prompt = model_of("rpe", decay=0.999), TEXT[:1].repeat(1, 4)[:, :length]
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
    dynamic, static = (model.generate(prompt, cache_implementation=kind, **options) for kind in (None, "static"))
    assert torch.equal(static.sequences, dynamic.sequences)
    places = states_of(static.past_key_values)[0].history.buffer.shape[-1]
    assert length + new - 1 <= places <= length + new + 128
    more = model.generate(
        static.sequences, past_key_values=static.past_key_values, max_new_tokens=200, do_sample=False
    )
    assert torch.equal(more, model.generate(static.sequences, max_new_tokens=200, do_sample=False))
