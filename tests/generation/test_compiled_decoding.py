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
from helpers.models import relative_error, slow
from modeling_tnn import numerics
from modeling_tnn.cache_tnn import CACHE, max_crop
from modeling_tnn.tno import continue_sequence
from modeling_tnn.tools.layout import to_column_major

FIRST = ("rpe-medium-decay", "rtf", "converted")
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


LIMITED = {"hyena_filter_beyond": "error", "hyena_filter_length": 70}


@pytest.mark.parametrize(
    ("name", "fields", "graphs"), slow(("rpe-medium-decay", {}, 2), ("implicit", LIMITED, 2), ("attention", {}, 3))
)
def test_one_graph_and_the_same_tokens(name, fields, graphs):
    """After padding on the left; a text without padding, which has no mask; and padding again.

    A window makes transformers' static cache count in Python until it is full: a graph before, and one after.
    """
    model, config = model_of(name, **fields), compiling("eager")
    for start, length, pads, new in ((0, 11, 4, 60), (11, 22, 0, 9), (40, 30, 7, 9)):
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


@pytest.mark.parametrize(("name", "rows", "pads"), [("rtf", 3, 4), *slow(("sinusoidal", 1, 0))])
def test_what_enters_a_compiled_step_stays_the_same(name, rows, pads, monkeypatch):
    """Shapes, strides and dtypes, over many tokens and two more texts, and the addresses of weights and states."""
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
    for prompt, new in zip(texts, (90, 9, 9), strict=True):
        generated = generate(model, prompt, new, config, attention_mask=mask, return_dict_in_generate=True)
        assert torch.equal(generated.sequences, generate(model, prompt, new, attention_mask=mask))
        own = own_addresses(model, generated[CACHE])
        del generated
    assert counters["stats"]["unique_graphs"] == 1 and len(layouts) == len(given) == 90 + 18 - 3
    assert len(set(layouts)) == 1 and all(one == given[0] for one in given)
    assert all(one == addresses[0] for one in addresses)
    assert addresses[0] <= own and len(addresses[0]) == len(layouts[0]) - len(given[0])


OTHERS = ("rtf", "hybrid", "rpe-medium-decay", "converted", "hyena")


@pytest.mark.parametrize(("name", "hosts"), [("rtf", ()), *slow(*((name, ("cpu",)) for name in OTHERS))])
@torch.no_grad()
def test_compiled_steps_among_others(name, hosts, monkeypatch):
    """After a long prompt, with steps, chunks, crops (of Toeplitz layers alone), changed rows and saved caches.

    The state of a cache that a caller keeps is not written by the next text.
    """
    monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)  # without the CPU: the branches of an accelerator
    model = model_of(name)
    first = {"rtf": 9, "hybrid": 9}.get(name, 1250)  # shorter and longer than what `crop` may take back
    text = torch.randint(2, 99, (2, first + 150), generator=torch.Generator().manual_seed(3))
    cache, other = started(model, text, first, 1400), started(model, text.flip(0), first, 1400)
    expected, rows = model(text, use_cache=False).logits, torch.arange(2)
    steps, other_steps = Steps(model, cache), Steps(model, other)

    def check(call, start, end, rows):
        assert (
            relative_error(call(text[rows], first + start, first + end), expected[rows, first:][:, start:end]) < 1e-9
        )

    def eager(text, start, end):
        return model(text[:, start:end], past_key_values=cache).logits

    check(steps, 0, 40, rows)
    check(other_steps, 0, 9, rows.flip(0))
    for call, start, end in ((eager, 40, 41), (steps, 41, 50), (eager, 50, 70), (steps, 70, 79)):
        check(call, start, end, rows)
    if name != "hybrid":
        steps(text.flip(1), first + 79, first + 100)
        cache.crop(-21)
    check(steps, 79, 110, rows)
    for position in range(110, 117):
        cache.reorder_cache(torch.tensor([1, 0]))
        rows = rows.flip(0)
        check(steps, position, position + 1, rows)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        check(Steps(model, twin), 117, 126, rows)


@pytest.mark.parametrize("name", [FIRST[0], *slow(FIRST[1])])
@torch.no_grad()
def test_a_step_that_was_prepared_and_not_taken(name):
    model = model_of(name)
    cache = started(model, TEXT, 9)
    steps, expected = Steps(model, cache), model(TEXT, use_cache=False).logits
    steps(TEXT, 9, 40)
    given = {"next_sequence_length": 1, "past_key_values": cache, "use_cache": True}
    for position in (40, 41, 42):
        model.prepare_inputs_for_generation(TEXT[:, : position + 1], **given)
        if position == 41:
            logits = model(TEXT[:, 41:42], past_key_values=cache).logits
        else:
            cache.reorder_cache(torch.arange(2))
            logits = steps(TEXT, position, position + 1)
        assert relative_error(logits, expected[:, position : position + 1]) < 1e-9
    model.prepare_inputs_for_generation(TEXT[:, :44], **given)
    assert max_crop(cache.layers[0]) >= 20
    cache.crop(-2)
    assert cache.get_seq_length() == 41
    assert relative_error(steps(TEXT, 41, 60), expected[:, 41:60]) < 1e-9


@pytest.mark.parametrize("name", ["rpe", *slow("rtf")])
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
            for parameter in model.model.layers[0].mixer.parameters():
                parameter.mul_(1.1)
            for parameter in model.model.layers[0].glu.parameters():  # out of the memory that layers share
                parameter.data = parameter * 1.1


def test_compiled_steps_that_diverge_are_found():
    model = model_of("rtf", rtf_constraint=None, max_position_embeddings=100)
    with torch.no_grad():
        denominator = model.model.layers[1].mixer.tno.denominator
        denominator.zero_()
        denominator[:, 0] = -1.1
    cache = started(model, TEXT, 9)
    for layer in cache.layers:
        state = layer.states["tno"]
        continue_sequence(state.recurrence.operator, layer, torch.zeros(2, 1, state.prompt.v.shape[2]).double())
        state.history.buffer.fill_(torch.finfo(torch.float64).max)
    with pytest.raises(ValueError, match=r"Layer 1, channel \d+: a pole of radius 1.1"):
        Steps(model, cache)(TEXT, 10, 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST[:2])
def test_the_compiler(name):
    model = model_of(name)
    expected = generate(model, TEXT[:, :20], 100)
    assert torch.equal(generate(model, TEXT[:, :20], 100, compiling("inductor")), expected)


@pytest.mark.parametrize("length, new", [(1, 20), *slow((600, 20))])
def test_a_static_cache_is_no_longer_than_its_text(length, new):
    """The kernel of a slow decay has 20,000 taps, and the text has none so far away."""
    model, prompt = model_of("rpe", decay=0.999), TEXT[:1].repeat(1, 4)[:, :length]
    assert StaticCache(config=model.config, max_cache_len=9).is_compileable
    assert not DynamicCache(config=model.config).is_compileable
    static = generate(model, prompt, new, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(static.sequences, generate(model, prompt, new))
    places = states_of(static.past_key_values)[0].history.buffer.shape[-1]
    assert length + new - 1 <= places <= length + new + 128
    more = generate(model, static.sequences, 150, past_key_values=static.past_key_values)
    assert torch.equal(more, generate(model, static.sequences, 150))


def test_weights_by_columns():
    """They stay so where a static cache joins them; a text that was written before changes nothing."""
    model = model_of("rpe")
    expected = generate(model, TEXT[:, :20], 60, cache_implementation="static")
    assert to_column_major(model) is model
    for static in (None, "static"):
        assert torch.equal(generate(model, TEXT[:, :20], 60, cache_implementation=static), expected)
        mixer = model.model.layers[0].mixer
        weights = [mixer.u_proj.weight, mixer.v_proj.weight, model.lm_head.weight]
        assert all(weight.stride(0) == 1 < weight.stride(1) for weight in weights)
        assert mixer.o_proj.weight.stride(1) == 1, "rows are read faster where there are fewer"
    assert mixer.joined[0].data_ptr() == mixer.u_proj.weight.data_ptr() and mixer.joined[0].stride(0) == 1


def test_weights_of_inference_mode_stay_where_they_are():
    with torch.inference_mode():
        model = to_column_major(model_of("rpe"))
        static = generate(model, TEXT[:, :5], 9, cache_implementation="static")
        assert model.lm_head.weight.is_contiguous()
        assert torch.equal(static, generate(model, TEXT[:, :5], 9))
