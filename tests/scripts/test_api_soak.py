"""Two hundred clients at once, half of whom go away: nothing is left, and nobody gets the text of another."""

import asyncio
import gc
import random
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import save_model
from modeling_tnn.serving.request import Request

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("prometheus_client")

from helpers.api_server import serving, wait_until_idle  # noqa: E402
from modeling_tnn.serving.engine import Text  # noqa: E402

CLIENTS, TOKENS = 200, 16
TEXT = "the quick brown fox jumps over the lazy dog pack my box with five dozen jugs of liquor"


def task_of(number: int) -> dict:
    """What a client asks for; some ask for the same."""
    chance = random.Random(number % 50)
    prompt = " ".join(chance.choices(TEXT.split(), k=chance.choice([1, 3, 20, 60])))
    options = {"temperature": chance.choice([0, 0.8]), "top_p": 0.9, "seed": number % 50}
    return {"prompt": prompt, "max_tokens": TOKENS} | options


def text_of(model, tokenizer, task: dict) -> str:
    inputs = tokenizer(task["prompt"], return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(task["seed"])
    sampling = {"temperature": task["temperature"], "top_p": 0.9, "top_k": 0} if task["temperature"] else {}
    output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=bool(sampling), **sampling)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


async def stay(client, name: str, number: int) -> str:
    """The whole text, in one answer or in a stream."""
    if number % 4 == 0:
        return (await client.completions.create(model=name, **task_of(number))).choices[0].text
    stream = await client.completions.create(model=name, stream=True, **task_of(number))
    return "".join([chunk.choices[0].text async for chunk in stream])


async def leave(client, name: str, number: int) -> None:
    """Ask for a long text, and go away: before it begins, between two pieces, or without a stream."""
    long = task_of(number) | {"max_tokens": 5000}
    if number % 3 == 0:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model=name, timeout=random.Random(number).uniform(0.1, 1), **long)
        return
    stream = await client.completions.create(model=name, stream=True, **long)
    for _ in range(number % 3 * 3):
        await anext(aiter(stream))
    await stream.close()


async def everybody(service) -> list[str | None]:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as http:
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, http_client=http)
        tasks = [(leave if number % 2 else stay)(client, service.name, number) for number in range(CLIENTS)]
        return await asyncio.gather(*tasks)


@pytest.mark.slow
def test_two_hundred_clients(tmp_path):
    folder = save_model(tmp_path, tno_type="rpe")
    AutoModelForCausalLM.from_pretrained(folder).double().save_pretrained(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = [text_of(model, tokenizer, task_of(number)) for number in range(50)]
    assert len(set(expected)) > 30
    with serving(folder, max_new_tokens=5000, max_waiting=CLIENTS) as service:
        texts = asyncio.run(everybody(service))
        wait_until_idle(service)
        assert all(number % 2 or text == expected[number % 50] for number, text in enumerate(texts))
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) in (Request, Text)]
        # The pools of the servers grow and shrink, and have fewer threads than clients that went away.
        assert threading.active_count() < CLIENTS / 2
        samples = [sample for metric in service.metrics.texts.collect() for sample in metric.samples]
        ended = {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}
    assert ended.keys() <= {"length", "cancelled"} and ended["length"] == CLIENTS / 2 >= ended["cancelled"]
