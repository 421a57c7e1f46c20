"""The routes of OpenAI's API, by the client of OpenAI: texts, streams, limits, errors, clients that go away."""

import json
import re
import sys
import threading
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import run, save_model

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx2")  # openai brings it
pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("prometheus_client")

from helpers.api_server import serving, wait_until_idle  # noqa: E402
from modeling_tnn.serving.scheduler import Batch, QueueFullError  # noqa: E402
from tnn_programs.serving.engine import Text  # noqa: E402

PROMPT = "The quick brown"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<s>{{ m['content'] }}</s>{% endfor %}<s>"
)
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float64 model: equal tokens do not depend on rounding."""
    folder = save_model(tmp_path_factory.mktemp("model"), tno_type="rtf")
    AutoModelForCausalLM.from_pretrained(folder).double().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service(folder):
    limits = {"max_prompt_tokens": 40, "max_new_tokens": 5000, "max_body_bytes": 4000}
    with serving(folder, max_batch_size=8, max_waiting=10, **limits) as service:
        yield service


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    wait_until_idle(service)


@pytest.fixture
def complete(client, service):
    """A completion of the one model; several answers or a stream as they come."""
    return lambda **fields: client.completions.create(**{"model": service.name, "prompt": PROMPT} | GREEDY | fields)


@pytest.fixture
def chat(client, service):
    def ask(*messages, **fields):
        messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        return client.chat.completions.create(**{"model": service.name, "messages": messages} | GREEDY | fields)

    return ask


@pytest.fixture(scope="module")
def written(folder):
    """The text of `generate`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def write(prompt=PROMPT, new=12, seed=0, **options):
        ids = torch.tensor([tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt])
        torch.manual_seed(seed)
        options = {"do_sample": False} | options
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, top_k=0, **options)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    return write


def test_a_completion(client, complete, service, written):
    """Of the one model; its events are JSON, in any language, until [DONE]."""
    assert [model.id for model in client.models.list()] == [service.name] == [client.models.retrieve(service.name).id]
    done = complete()
    assert done.choices[0].text == written() and done.choices[0].finish_reason == "length"
    read = len(service.tokenizer(PROMPT)["input_ids"])
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (read, 12, read + 12)
    body = {"model": service.name, "prompt": PROMPT, "stream": True} | GREEDY
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def test_prompts_and_answers(complete, service, written):
    """Several prompts, of text and of tokens; several answers have seeds one after the other."""
    prompts, settings = [PROMPT, "Pack my box"], {"temperature": 0.8, "top_p": 0.9}
    done = complete(prompt=prompts, n=2, seed=5, max_tokens=9, **settings)
    expected = [written(prompts[i // 2], 9, 5 + i, do_sample=True, **settings) for i in range(4)]
    assert [choice.text for choice in done.choices] == expected and len(set(expected)) == 4
    tokens = service.tokenizer(prompts)["input_ids"]
    for given, texts in ((tokens, prompts), (tokens[0], prompts[:1])):
        assert [choice.text for choice in complete(prompt=given).choices] == list(map(written, texts))


def test_streams(complete, written):
    """The number of tokens comes at the end; nothing of a stop string appears, not even in part."""
    texts, chunks = ["", ""], list(complete(n=2, stream=True, max_tokens=100, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [written(new=100)] * 2 and len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == 200 and chunks[-1].choices == []
    whole = written(new=60)
    end = min(whole.find(whole[20:23]), 20)
    for stream in (False, True):
        done = complete(max_tokens=60, stop=[whole[20:23], "never there"], stream=stream)
        *pieces, last = [chunk.choices[0] for chunk in done] if stream else done.choices
        assert "".join(piece.text for piece in [*pieces, last]) == whole[:end] and last.finish_reason == "stop"
        assert all(piece.finish_reason is None for piece in pieces)
        assert stream or done.usage.completion_tokens < 60


def test_a_chat(chat, service, written):
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}, {"role": "assistant", "content": "x"}]
    expected = written(service.tokenizer(f"<s>{PROMPT}</s><s>x</s><s>")["input_ids"])
    done = chat(*messages)
    assert done.choices[0].message.content == expected and done.object == "chat.completion"
    first, *others = [chunk.choices[0] for chunk in chat(*messages, stream=True)]
    assert first.delta.role == "assistant" and others[-1].finish_reason == "length"
    assert "".join(one.delta.content or "" for one in others) == expected


def test_an_end_of_the_text(complete, service, monkeypatch):
    """The token that ends a text is not in it. A temperature near 0 is greedy."""
    model, ids = service.engine.scheduler.model, service.tokenizer(PROMPT)["input_ids"]
    assert complete(temperature=1e-40).choices[0].text == complete().choices[0].text
    third = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0, len(ids) + 2].item()
    monkeypatch.setattr(model.generation_config, "eos_token_id", third)
    done = complete()
    assert done.choices[0].finish_reason == "stop" and done.usage.completion_tokens <= 3


def logs_of(service, ids: list[int]) -> torch.Tensor:
    """The logarithms of the probabilities after each token, by a full forward pass."""
    with torch.no_grad():
        return service.model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("new, stream", [(0, False), (1, False), (12, False), (12, True)])
def test_logprobs_of_a_completion(complete, service, monkeypatch, new, stream):
    """Those of a full forward pass, of the prompt too, for texts side by side, also where nothing is written."""
    texts, submit, found = [PROMPT, "Pack my box with five"], service.engine.submit, [[], []]
    prompts, requests = service.tokenizer(texts)["input_ids"], []
    monkeypatch.setattr(
        service.engine, "submit", lambda *given, **asked: requests.append(submit(*given, **asked)) or requests[-1]
    )
    asked = {"prompt": prompts, "max_tokens": new, "echo": True, "logprobs": 3, "seed": 5, "temperature": 2}
    done = complete(stream=stream, **asked)
    for choice in [one.choices[0] for one in done] if stream else done.choices:
        found[choice.index].append(choice)
    for text, prompt, request, choices in zip(texts, prompts, requests, found, strict=True):
        tokens, given, likeliest, offsets = (
            [entry for choice in choices for entry in getattr(choice.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        count, read = len(prompt) + new, request.ids[0, : len(prompt) + new].tolist()
        assert (
            len(tokens) == len(given) == len(likeliest) == len(offsets) == count
            and choices[0].text[: len(text)] == text
        )
        ends = [*offsets[1:], len(text)][: len(prompt)]
        assert [text[begin:end] for begin, end in zip(offsets, ends, strict=False)] == tokens[: len(prompt)]
        logs = logs_of(service, read)[:-1]
        assert given[0] is likeliest[0] is None and choices[-1].finish_reason == "length"
        assert given[1:] == pytest.approx(logs.gather(-1, torch.tensor(read)[1:, None])[:, 0].tolist(), abs=1e-5)
        for top, own, best in zip(likeliest[1:], given[1:], logs.amax(-1).tolist(), strict=True):
            assert max(top.values()) == pytest.approx(best, abs=1e-5) and own <= max(top.values()) and len(top) <= 4
    assert stream or done.usage.completion_tokens == 2 * new


def test_logprobs_of_a_chat(chat, service):
    """Each token with its bytes and the likeliest ones; the same in a stream."""
    asked = {"logprobs": True, "top_logprobs": 2}
    content = chat("x", **asked).choices[0].logprobs.content
    streamed = [chunk.choices[0].logprobs for chunk in chat("x", stream=True, **asked)]
    assert [entry for part in streamed if part for entry in part.content] == content and len(content) == 12
    ids = service.tokenizer("<s>x</s><s>")["input_ids"]
    logs = logs_of(service, ids)[-1].topk(2).values.tolist()
    assert [entry.logprob for entry in content[0].top_logprobs] == pytest.approx(logs, abs=1e-5)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content if entry.bytes)
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    assert chat("x", logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_finish_reasons(service):
    """A text has one, whenever it ends while an answer is written."""
    reasons = iter([None, None, "length", "length"])
    fake = type(
        "Ended", (), {"reason": property(lambda _: next(reasons)), "is_done": property(lambda _: next(reasons))}
    )
    text = Text(service.tokenizer, 0, [5], (), None, loop=object())
    text.request = fake()
    assert [text.take().finish_reason for _ in range(3)] == [None, None, "length"]


# What clients send that asks for nothing: fields without a value, and those whose value is what happens anyway.
NOTHING = {
    "n": 1, "stream": False, "stop": [], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
    "logprobs": False, "response_format": {"type": "text"}, "seed": None, "user": None, "stream_options": None,
    "best_of": 1, "echo": None, "suffix": "", "functions": None, "top_k": -1, "repetition_penalty": 1.0,
    "service_tier": "auto", "store": False, "metadata": {"session": "1"}, "prompt_cache_key": "x",
    "no such field": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"],
}  # fmt: skip


def test_fields_that_ask_for_nothing(chat, complete, written):
    """As the text without them; an answer is a message of the next request as it came. Others are refused by name."""
    assert complete(extra_body=NOTHING | {"stop": ""}).choices[0].text == written()
    message = {"role": "user", "content": "The", "name": None}
    first = chat(message, extra_body=NOTHING)
    assert first == chat(message).model_copy(update={"id": first.id, "created": first.created})
    answer = first.choices[0].message.model_dump() | {"tool_calls": [], "annotations": []}
    assert chat(message, answer, message, extra_body={"stream_options": {"include_usage": None}}).choices
    for name, value in (("tools", [{}]), ("logit_bias", {"5": 1}), ("response_format", {"type": "json_object"})):
        with pytest.raises(openai.BadRequestError, match=f"`{name}` is not supported; leave it out"):
            chat("The", extra_body={name: value})


LONE_SURROGATES = [
    {"model": "\ud800"}, {"prompt": ["a\udfff"]}, {"stop": ["\udc80"]}, {"user": "\ud800"}, {"\ud800": 1},
    {"stream_options": {"\ud800": True}}, {"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]},
]  # fmt: skip


def test_bodies_that_are_no_text_or_no_json(service):
    """Status 400; lone surrogates are no text, in values and in names."""
    bodies = [b'{"model": "\xed\xa0\x80"}', b"[" * 3000, b'{"metadata":' * 300 + b"1" + b"}" * 300, b"[]", b"1", b"{"]
    given = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
    with httpx.Client(base_url=service.url, headers={"Content-Type": "application/json"}) as sender:
        for route, body in given.items():
            wrong = [json.dumps({"model": service.name} | body | fields) for fields in LONE_SURROGATES]
            for content in bodies + wrong:
                answer = sender.post(f"/v1/{route}", content=content)
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["message"], content
                assert error["type"] == "invalid_request_error", content


REFUSED = [
    ({"model": "other"}, openai.NotFoundError, "model_not_found"),
    ({"prompt": "word " * 60}, openai.BadRequestError, "context_length_exceeded"),
    ({"prompt": ""}, openai.BadRequestError, "empty_prompt"),
    ({"prompt": []}, openai.BadRequestError, "prompt"),
    ({"prompt": [5, 300]}, openai.BadRequestError, "invalid_token"),
    ({"max_tokens": 5001}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": 0}, openai.BadRequestError, "greater_than_equal"),
    ({"temperature": -1}, openai.BadRequestError, "greater_than_equal"),
    ({"top_p": 0}, openai.BadRequestError, "greater_than"),
    ({"n": 20}, openai.BadRequestError, "n"),
    ({"stop": ["a"] * 5}, openai.BadRequestError, "stop"),
    ({"suffix": "x"}, openai.BadRequestError, "extra_forbidden"),
    ({"extra_body": {"beams": 3}}, openai.BadRequestError, "extra_forbidden"),
    ({"prompt": "x" * 5000}, openai.APIStatusError, "body_too_large"),
    ({"prompt": "x" * 1400}, openai.BadRequestError, "context_length_exceeded"),
    ({"prompt": [5, True]}, openai.BadRequestError, "prompt"),
    ({"logprobs": 21}, openai.BadRequestError, "less_than_equal"),
    ({"extra_body": {"top_logprobs": 2}}, openai.BadRequestError, "extra_forbidden"),
]


def test_what_is_refused(chat, complete, service, monkeypatch):
    """In OpenAI's form, and nothing of it is left in the queue; routes that are none, templates that refuse."""
    for fields, error, code in REFUSED:
        with pytest.raises(error) as raised:
            complete(**fields)
        assert raised.value.code == code and raised.value.body["message"], fields
        assert raised.value.status_code == {openai.APIStatusError: 413}.get(error, raised.value.status_code)
        wait_until_idle(service)
    assert httpx.get(f"{service.url}/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
    assert httpx.get(f"{service.url}/v1/completions").status_code == 405
    chunked = httpx.post(f"{service.url}/v1/completions", content=iter([b" " * 3000] * 3))
    assert chunked.status_code == 413 and "at most 4,000 bytes" in chunked.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="no system"):
        chat({"role": "system", "content": "x"})
    for template in (
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(9**9) %}{% endfor %}",
        "{{ 'x' * 9**7 }}",
    ):
        monkeypatch.setattr(service.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match="template|characters"):
            chat("x")
    monkeypatch.setattr(service.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        chat("x")
    full = [DEFAULT, DEFAULT, QueueFullError("texts are waiting")]
    monkeypatch.setattr(service.engine, "submit", Mock(wraps=service.engine.submit, side_effect=full))
    with pytest.raises(openai.RateLimitError) as raised:
        complete(n=3, max_tokens=5000)
    assert (raised.value.code, raised.value.response.headers["retry-after"]) == ("queue_full", "1")
    wait_until_idle(service)
    monkeypatch.setattr(service, "tokens", lambda prompt: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="The server failed"):
        complete()


def test_a_client_that_goes_away(complete, service):
    """Its text ends, long before its tokens are written, in a stream or not; another one goes on."""
    scheduler, url = service.engine.scheduler, f"{service.url}/v1/completions"
    body = {"model": service.name, "prompt": PROMPT, "max_tokens": 5000, "temperature": 0}
    with httpx.stream("POST", url, json=body | {"stream": True}) as answer:
        next(answer.iter_lines())
        requests = list(scheduler._writing.running())
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url, json=body, timeout=0.4)
    requests += scheduler._writing.requests
    assert complete().usage.completion_tokens == 12
    wait_until_idle(service)
    assert requests and all(len(request.tokens) < 5000 for request in requests)


def test_health_and_metrics(complete, service):
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    complete()
    page = httpx.get(f"{service.url}/metrics").text
    for name in ("tnn_texts_running 0.0", "tnn_texts_waiting 0.0", "tnn_state_bytes 0.0", 'route="/v1/completions"'):
        assert name in page
    assert float(re.search(r"^tnn_new_tokens_total (\S+)", page, re.MULTILINE)[1]) >= 12
    assert float(re.search(r"^tnn_first_token_seconds_count (\S+)", page, re.MULTILINE)[1]) >= 1


def test_failures(complete, service, folder, monkeypatch):
    """Of one text, whole or in a stream, and of a step, which ends all: the server goes on. Not of the engine."""
    with monkeypatch.context() as patch:
        patch.setattr(Text, "put", lambda text, value: 1 / 0 if value.numel() == 1 else None)
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="not finished: ZeroDivisionError"):
                list(complete(stream=stream))
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "remove_ended", lambda *given: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="not finished: ZeroDivisionError"):
            complete()
    assert service.engine.is_alive and complete().usage.completion_tokens == 12
    with serving(folder) as other:
        other.engine.close()
        answer = httpx.get(f"{other.url}/health")
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"


def test_the_program(folder, monkeypatch):
    """It serves the routes with the options that it is given; without a package it says what to install."""
    import uvicorn

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "uvicorn", None)
        without.delitem(sys.modules, "tnn_programs.serving.server", raising=False)  # another test may have loaded it
        done = run("api.py", "--model_name_or_path", folder, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert 'pip install "modeling-tnn[api]"' in done.stderr
    asked, before = [], threading.active_count()
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: asked.append(server.config))
    run("api.py", "--model_name_or_path", folder, "--port", 0, "--max_batch_size", 3)
    assert asked[0].host == "127.0.0.1" and threading.active_count() == before
    done = run("api.py", "--model_name_or_path", folder, "--max_waiting", 0, check=False)
    assert done.returncode == 2 and "--max_waiting must be at least 1, got 0" in done.stderr
