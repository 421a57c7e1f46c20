"""Many texts in one batch: the tokens of each are those of `generate` alone, whatever comes and goes beside it."""

import random

import pytest
import torch

from helpers.caches import model_of
from helpers.models import slow
from modeling_tnn.serving.rows import bytes_of_text
from modeling_tnn.serving.scheduler import BatchScheduler, QueueFullError

EVERY_STATE = pytest.mark.parametrize("name", ["rpe", "rtf", *slow("hybrid", "rpe-no-decay", "modal", "hyena")])


def prompt_of(length, seed=0):
    return torch.randint(2, 99, (1, length), generator=torch.Generator().manual_seed(seed))


def alone(model, prompt, seed=0, **options):
    """The new tokens of `generate` for one text."""
    torch.manual_seed(seed)
    return model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


def random_texts(count, seed):
    """Prompts with options: greedy or drawn, some with stop tokens, of all lengths."""
    chance = random.Random(seed)
    texts = []
    for number in range(count):
        options = {"max_new_tokens": chance.choice([1, 2, 5, 20, 40]), "do_sample": chance.random() < 0.5}
        if options["do_sample"]:
            options |= {"temperature": chance.choice([0.7, 1.0]), "top_p": 0.9, "top_k": chance.choice([0, 20])}
        if chance.random() < 0.5:
            options["eos_token_id"] = list(range(10, 18))
            options["pad_token_id"] = 0
        if chance.random() < 0.3:
            options["repetition_penalty"] = 1.3
        texts.append((prompt_of(chance.choice([1, 2, 7, 30, 150]), number), number, options))
    return texts


@EVERY_STATE
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4, 5, 6, 7)])
def test_any_order_of_arrivals(name, seed):
    """Texts come between the steps of others; small batches and chunks, so that they wait, join and replace."""
    model, chance = model_of(name), random.Random(seed)
    most, prefill = chance.choice([3, 8]), chance.choice([20, 2048])
    scheduler = BatchScheduler(model, most, prefill_tokens=prefill, tokens_per_launch=[4, 1][seed % 2])
    texts, requests = random_texts(14, seed), []
    for prompt, number, options in texts:
        requests.append(scheduler.submit(prompt, seed=number, **options))
        for _ in range(chance.choice([0, 0, 1, 4, 15])):
            scheduler.step()
    scheduler.run()
    for (prompt, number, options), request in zip(texts, requests, strict=True):
        assert request.error is None and request.tokens == alone(model, prompt, number, **options)
        ends = options.get("eos_token_id", [])
        assert request.reason == ("stop" if request.tokens[-1] in ends else "length")
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.state_bytes) == (0, 0, 0)


GREEDY = {"max_new_tokens": 12, "do_sample": False}


def test_a_prompt_with_padding():
    """Its mask counts, wherever the padding stands."""
    model, mask = model_of("hybrid"), torch.ones(1, 20, dtype=torch.long)
    mask[0, [0, 1, 7, 18]] = 0
    prompt, options = prompt_of(20), GREEDY | {"attention_mask": mask}
    scheduler = BatchScheduler(model)
    scheduler.submit(prompt_of(30), **GREEDY)
    request = scheduler.submit(prompt, **options)
    scheduler.run()
    assert request.tokens == alone(model, prompt, **options) != alone(model, prompt, **GREEDY)


def test_streams():
    """Tokens come one by one, to an iterator and to a streamer of transformers, while others advance."""
    model, heard = model_of("sliding"), []
    scheduler = BatchScheduler(model)

    class Listener:
        def put(self, tokens):
            heard.append(tokens.flatten().tolist())

        def end(self):
            heard.append("end")

    other = scheduler.submit(prompt_of(9), streamer=Listener(), **GREEDY)
    request = scheduler.submit(prompt_of(5, 1)[0], **GREEDY)
    for count, token in enumerate(scheduler.stream(request), 1):
        assert len(request.tokens) == len(other.tokens) == count and token == request.tokens[-1]
    assert request.tokens == alone(model, prompt_of(5, 1), **GREEDY)
    assert heard == [prompt_of(9)[0].tolist(), *([token] for token in other.tokens), "end"]


@pytest.mark.parametrize("name", ["hybrid", *slow("rpe-no-decay")])
def test_launches_have_room(name, caplog):
    """Short texts go on beside the row of a long one that has ended, behind the places for its length."""
    model, texts = model_of(name), [(prompt_of(1000), 8)] + [(prompt_of(3, seed), 60) for seed in range(1, 6)]
    scheduler = BatchScheduler(model, tokens_per_launch=4)
    requests = [scheduler.submit(prompt, max_new_tokens=new, do_sample=False) for prompt, new in texts]
    scheduler.run()
    for (prompt, new), request in zip(texts, requests, strict=True):
        assert request.tokens == alone(model, prompt, max_new_tokens=new, do_sample=False)
    assert "has failed" not in caplog.text


@pytest.mark.parametrize("count", [1, 4])
def test_probabilities_that_are_not_finite(count):
    """Such a text ends with an error, as in `generate`; a greedy one has no probabilities."""
    model = model_of("rpe")
    scheduler = BatchScheduler(model, tokens_per_launch=count)
    requests = [scheduler.submit(prompt_of(4), max_new_tokens=9, do_sample=draws) for draws in (False, True)]
    while not requests[1].tokens:
        scheduler.step()
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    scheduler.run()
    assert [one.reason for one in requests] == ["length", "error"] and "not finite" in str(requests[1].error)


def test_many_prompts_at_once():
    """The random numbers of the process have no part."""
    model, before = model_of("rtf"), torch.get_rng_state()
    prompts, options = [prompt_of(3 + index, index) for index in range(5)], GREEDY | {"do_sample": True}
    found = BatchScheduler(model, max_batch_size=2).generate(prompts, seeds=range(5), **options)
    assert torch.equal(before, torch.get_rng_state())
    assert found == [alone(model, prompt, seed, **options) for seed, prompt in enumerate(prompts)]


def test_cancelling():
    """A text that waits, one whose prompt is being read, and one that is written; the others do not notice."""
    model = model_of("hybrid")
    scheduler = BatchScheduler(model, max_batch_size=3, prefill_tokens=8)
    requests = [scheduler.submit(prompt_of(4 + index, index), **GREEDY) for index in range(5)]
    while not requests[0].tokens:
        scheduler.step()
    reading = scheduler.submit(prompt_of(90), **GREEDY)
    scheduler.cancel(requests[1])
    scheduler.cancel(requests[4])
    scheduler.step()
    assert scheduler.num_running == 3 and requests[1].reason == requests[4].reason == "cancelled"
    while requests[3].tokens[:1] == []:
        scheduler.step()
    scheduler.step()
    scheduler.cancel(reading)
    scheduler.run()
    assert reading.reason == "cancelled" and reading.tokens == []
    for index in (0, 2, 3):
        assert requests[index].tokens == alone(model, prompt_of(4 + index, index), **GREEDY)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.state_bytes) == (0, 0, 0)


@pytest.mark.parametrize("name", ["rpe", "hybrid"])
def test_a_limit_of_memory(name):
    """As many texts as fit; the others wait, and are the same. What can never fit is refused."""
    model = model_of(name)
    limit = int(3.5 * bytes_of_text(model.get_decoder(), 162))
    scheduler, most = BatchScheduler(model, memory_limit=limit, max_batch_size=100), 0
    texts = [(length, seed) for seed, length in enumerate([5, 150, 9, 20, 140, 3, 30, 31])]
    requests = [scheduler.submit(prompt_of(*text), **GREEDY) for text in texts]
    while scheduler.step():
        held = 0 if scheduler._reading.requests else scheduler.state_bytes
        most = max(most, held)
        assert held <= limit
    assert most > limit / 5
    for text, request in zip(texts, requests, strict=True):
        assert request.tokens == alone(model, prompt_of(*text), **GREEDY)
    if name != "rpe":  # states that grow
        with pytest.raises(ValueError, match="`memory_limit` must be at least"):
            scheduler.submit(prompt_of(5), max_new_tokens=10_000)


def test_a_place_is_no_queue():
    """A text waits where no place is free; clients have queues of their own, up to a bound for all."""
    scheduler = BatchScheduler(model_of("rtf"), max_batch_size=3, max_waiting=1)
    for client in "aaaabcd":
        scheduler.submit(prompt_of(3), client=client, **GREEDY)
    for client in "ae":
        with pytest.raises(QueueFullError, match="texts are waiting"):
            scheduler.submit(prompt_of(3), client=client, **GREEDY)


@pytest.mark.parametrize("name", ["rtf", "hybrid"])
def test_clients_share_the_places(name):
    """The short text of one ends soon beside many long ones of another, which are read again and are the same."""
    model = model_of(name)
    scheduler = BatchScheduler(model, max_batch_size=4, prefill_tokens=64)
    prompts = [prompt_of(3 + number, number) for number in range(9)]
    sampled = {"max_new_tokens": 60, "do_sample": True}
    many = [scheduler.submit(prompt, seed, client="many", **sampled) for seed, prompt in enumerate(prompts)]
    while not many[3].tokens:
        scheduler.step()
    for _ in range(2):
        few = [scheduler.submit(prompt_of(5), client="few", max_new_tokens=2, do_sample=False) for _ in range(3)]
        for _ in range(8):
            scheduler.step()
        assert all(request.is_done for request in few) and not any(request.is_done for request in many)
    scheduler.run()
    for seed, (prompt, request) in enumerate(zip(prompts, many, strict=True)):
        assert request.tokens == alone(model, prompt, seed, **sampled)


class Faulty:
    """A logits processor, stopping criterion or streamer that fails at the fourth call."""

    def __init__(self, answer=lambda scores: None):
        self.calls, self.answer = 0, answer

    def __call__(self, input_ids, scores=None):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("on purpose")
        return self.answer(scores)

    put = __call__

    def end(self):
        pass


def test_the_error_of_a_text_is_its_own():
    faults = [
        {"streamer": Faulty()},
        {"logits_processor": [Faulty(lambda scores: scores)]},
        {"stopping_criteria": [Faulty(lambda scores: torch.zeros(1, dtype=torch.bool))]},
    ]
    model = model_of("rpe")
    scheduler = BatchScheduler(model)
    requests = [scheduler.submit(prompt_of(4 + index, index), **GREEDY) for index in range(3)]
    bad = [scheduler.submit(prompt_of(6), **GREEDY, **fault) for fault in faults]
    with pytest.raises(RuntimeError, match="on purpose"):
        list(scheduler.stream(bad[0]))
    scheduler.run()
    for one in bad:
        assert one.reason == "error" and str(one.error) == "on purpose" and len(one.tokens) < 12
    for index, request in enumerate(requests):
        assert request.tokens == alone(model, prompt_of(4 + index, index), **GREEDY)


@pytest.mark.parametrize("name, at", [("rpe", 1), ("sliding", 1), ("rpe", 8)])
def test_a_pass_that_fails(name, at, monkeypatch):
    """Each text of the pass begins again by itself: the one at fault ends, the others go on with their numbers."""
    model = model_of(name)
    options, fault = GREEDY | {"do_sample": True}, 77
    scheduler = BatchScheduler(model)
    prompts = [prompt_of(4 + index, index) for index in range(4)]
    expected = [alone(model, prompt, seed, **options) for seed, prompt in enumerate(prompts)]
    requests = [scheduler.submit(prompt, seed=seed, **options) for seed, prompt in enumerate(prompts)]
    forward, marked = type(model.model).forward, []

    def failing(self, input_ids, *args, **given):
        output = forward(self, input_ids, *args, **given)
        if requests[2].length - prompts[2].shape[1] >= at:
            marked.append(len(input_ids))
            texts = scheduler._reading.requests or scheduler._writing.requests
            if requests[2] in texts:
                raise MemoryError(f"on purpose {fault}")
        return output

    monkeypatch.setattr(type(model.model), "forward", failing)
    scheduler.run()
    assert requests[2].reason == "error" and "on purpose" in str(requests[2].error)
    assert requests[2].tokens == expected[2][:at]
    for index in (0, 1, 3):
        assert requests[index].tokens == expected[index] and requests[index].error is None


def test_what_is_refused():
    model = model_of("rtf")
    scheduler = BatchScheduler(model)
    for options, message in (
        ({"num_beams": 2}, "greedy search or sampling, got beam_search"),
        ({"do_sample": True, "num_return_sequences": 2}, r"must be one text \(1, L\)"),
        ({"no_such_option": 1}, "no_such_option"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.submit(prompt_of(3), max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="must be one text"):
        scheduler.submit(prompt_of(3).repeat(2, 1), **GREEDY)
    with pytest.raises((TypeError, ValueError), match="input_ids|inputs"):
        scheduler.submit([1, 2], **GREEDY)
    with pytest.raises(ValueError, match="`max_batch_size` must be a whole number from 1 up, got 0"):
        BatchScheduler(model, max_batch_size=0)
    assert not scheduler.has_work
