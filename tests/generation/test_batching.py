"""Many texts in one batch: the tokens of each are those of `generate` alone, whatever comes and goes beside it."""

import random

import pytest
import torch

from helpers.hybrids import HYBRIDS
from helpers.models import exhaustive, lively_language_model
from modeling_tnn.batching import BatchScheduler, QueueFullError
from modeling_tnn.cache_rows import bytes_of_text

MODELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None},
    "fd": {"tno_type": "fd"},
    "rtf": {"tno_type": "rtf"},
    "modal": {"tno_type": "modal"},
    "hybrid": {"tno_type": "rpe", "decay": 0.97} | HYBRIDS["full"],
    "sliding": {"tno_type": "rtf"} | HYBRIDS["sliding"],
    "sinusoidal": {"tno_type": "rtf", "position_embedding": "sinusoidal"},
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def model_of(name):
    return lively_language_model(**MODELS[name])


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


@EVERY_MODEL
@pytest.mark.parametrize("seed", [0, *exhaustive(1, 2, 3, 4, 5, 6, 7)])
def test_any_order_of_arrivals(name, seed):
    """Texts come between the steps of others; small batches and chunks, so that they wait, join and replace."""
    model, chance = model_of(name), random.Random(seed)
    scheduler = BatchScheduler(model, max_batch_size=chance.choice([3, 8]), prefill_tokens=chance.choice([20, 2048]))
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
