"""Several tokens for each launch give what `generate` gives, with all that needs the host; see also `CacheTests`.

A CUDA graph is imitated on the CPU: the operations of a launch are recorded and run again on the same memory, without
the Python code between them. Reading a value on the host is an error there, as it is on a GPU.
"""

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.caches import Puts, generate, model_of, text_of
from helpers.models import slow
from helpers.scripts import SENTENCES
from modeling_tnn import inputs
from modeling_tnn.compile import token_loop
from modeling_tnn.compile.token_loop import write_tokens
from modeling_tnn.data.text import train_tokenizer
from modeling_tnn.serving import launches, scheduler
from modeling_tnn.serving.scheduler import BatchScheduler

NAMES = ("rtf", "hybrid", "modal", "sinusoidal", "multihyena-s4d")
LOOP = {"cache_implementation": "static", "custom_generate": write_tokens}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "repetition_penalty": 1.2}


class Recorder(TorchDispatchMode):
    """Operations with their tensors, to be run again on the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                fresh = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def recordings(monkeypatch):
    """Launches are recorded, as on CUDA; the list has one entry for each recording."""
    made = []

    def record(write, changed):
        before, state = [one.clone() for one in changed], torch.get_rng_state()
        with Recorder() as recorder:
            write()
        for one, value in zip(changed, before, strict=True):
            one.copy_(value)
        torch.set_rng_state(state)
        made.append(recorder)
        return recorder.replay

    monkeypatch.setattr(inputs, "can_be_read", lambda ids: False)
    monkeypatch.setattr(token_loop, "record", record)
    for module in (token_loop, launches, scheduler):
        monkeypatch.setattr(module, "uses_graphs", lambda device: True)
    monkeypatch.setattr(token_loop, "forward_of", lambda model_class, is_compiled: model_class.__call__)
    return made


@pytest.mark.parametrize("name", ["rpe-medium-decay", *slow(*NAMES)])
def test_recorded_launches_are_run_again(name, recordings):
    """For later launches, and for texts of other lengths; with attention, whose keys are new, once for each text."""
    model, counts = model_of(name), []
    padded = SAMPLED | {"attention_mask": torch.tensor([[0] * 5 + [1] * 7, [1] * 12])}
    for length, options in ((12, {}), (30, {}), (30, SAMPLED | {"min_new_tokens": 20}), (12, padded)):
        expected = generate(model, text_of(length), 37, **options)
        assert torch.equal(generate(model, text_of(length), 37, **LOOP, **options), expected)
        counts.append(len(recordings))
    assert counts[0] == 2 and (name == "hybrid" or counts[1] == 2)  # 16, 16 and 4 tokens after the first


@pytest.mark.parametrize("name", ["hybrid", *slow(*NAMES[2:], "rpe-no-decay", "rtf")])
def test_launches_of_many_texts_are_run_again(name, recordings):
    """In rows of which some are empty, whoever comes, ends and draws; with attention once for each length of cache."""
    model, counts = model_of(name), []
    writer = BatchScheduler(model, max_batch_size=3, tokens_per_launch=4)
    for round in range(3):
        options = [{"do_sample": False}, SAMPLED | {"repetition_penalty": 1.0, "temperature": 0.5 + round}]
        texts = [(text_of(5 + 30 * seed, 1), 3 + 5 * seed, options[seed % 2]) for seed in range(5)]
        requests = []
        for seed, (prompt, new, given) in enumerate(texts):
            requests.append(writer.submit(prompt, seed, max_new_tokens=new, **given))
            writer.step()
        writer.run()
        for seed, ((prompt, new, given), request) in enumerate(zip(texts, requests, strict=True)):
            torch.manual_seed(seed)
            expected = model.generate(prompt, max_new_tokens=new, **given)[0, prompt.shape[1] :].tolist()
            assert request.tokens == expected and request.error is None
        counts.append(len(recordings))
    assert counts[0] == counts[2] <= 6, counts  # 1, 2 and 4 tokens, with rows that draw and without


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpe", "rtf", "hybrid"])
def test_compiled_steps_are_one_graph(name, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(type(model_of(name)).__call__, fullgraph=True, backend="eager")
    monkeypatch.setattr(token_loop, "forward_of", lambda *_: compiled)
    model = model_of(name)
    for length in (12, 30):
        expected = generate(model, text_of(length), 40)
        with torch._dynamo.config.patch(error_on_recompile=name != "hybrid"):
            assert torch.equal(generate(model, text_of(length), 40, **LOOP), expected)
    torch._dynamo.reset()


class Every:
    """A criterion of a user: a row ends with a token that its number of tokens and the row choose."""

    def __call__(self, ids, scores, **_):
        return (ids[:, -1] + ids.shape[1]) % 13 == torch.arange(len(ids))


@pytest.mark.parametrize(("name", "count"), [("rpe", 16), *slow(("rpe", 2), ("rtf", 16), ("hybrid", 8))])
def test_what_needs_the_host(name, count):
    """Criteria, a streamer, and a cache that goes on."""
    model, prompt, puts = model_of(name), text_of(12, 3), [Puts(), Puts()]
    end = {"eos_token_id": generate(model, prompt, 30)[:, 12 + 20].tolist(), "pad_token_id": 1}
    every, whole = {"stopping_criteria": [Every()]}, {"return_dict_in_generate": True}
    for options in (end, every, end | every, SAMPLED | every | whole, whole | end):
        given = [options | {"streamer": streamer} for streamer in puts]
        expected = generate(model, prompt, 45, **given[0])
        found = generate(model, prompt, 45, tokens_per_launch=count, **LOOP, **given[1])
        assert puts[0] == puts[1]
        if "return_dict_in_generate" in options:
            past, found, expected = found.past_key_values, found.sequences, expected.sequences
            assert past.get_seq_length() == found.shape[1] - 1
            if name != "hybrid":  # its cache is full
                mask = {"attention_mask": torch.ones_like(found)}  # some of the tokens are those of padding
                found = generate(model, found, 9, past_key_values=past, custom_generate=write_tokens, **mask)
                expected = generate(model, expected, 9, **mask)
        assert torch.equal(found, expected)


def test_stop_strings():
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    model, prompt = model_of("rpe", vocab_size=300), tokenizer("The quick", return_tensors="pt").input_ids
    text = tokenizer.decode(generate(model, prompt, 15)[0, prompt.shape[1] + 4])
    options = {"stop_strings": [text], "tokenizer": tokenizer}
    assert torch.equal(generate(model, prompt, 15, **LOOP, **options), generate(model, prompt, 15, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_launch": 3}, "`tokens_per_launch` must be one of 1, 2, 4, 8, 16, got 3"),
        ({"num_beams": 2}, "`num_beams` and the like must ask for greedy search or sampling, got beam_search"),
        ({"cache_implementation": None}, "`cache_implementation` must be 'static' for several tokens at once"),
        ({"return_dict_in_generate": True, "output_scores": True}, "`output_scores` must be False"),
        ({"no_repeat_ngram_size": 2}, "must not need the host between two tokens, got NoRepeatNGramLogitsProcessor"),
    ],
)
def test_what_the_loop_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of("rpe"), text_of(7), 9, **LOOP | options)


def test_a_limited_filter_ends_where_that_of_generate_does():
    model = model_of("implicit", hyena_filter_beyond="error", hyena_filter_length=40)
    assert torch.equal(generate(model, text_of(9), 32, **LOOP), generate(model, text_of(9), 32))
    with pytest.raises(ValueError, match="`hyena_filter_length` must be at least 41"):
        generate(model, text_of(9), 40, **LOOP)
