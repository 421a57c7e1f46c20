"""The routes of OpenAI's API, by the client of OpenAI: texts, streams, limits, errors, clients that go away."""

import json
import re
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import run, save_model

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("prometheus_client")

from helpers.api_server import serving, wait_until_idle  # noqa: E402
from modeling_tnn.serving.scheduler import Batch  # noqa: E402
from tnn_scripts.serving.app import Limits  # noqa: E402
from tnn_scripts.serving.schema import ChatBody  # noqa: E402
from tnn_scripts.serving.text import Text  # noqa: E402

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
    with serving(folder, Limits(40, 5000, 4000), max_batch_size=8, max_waiting=10) as service:
        yield service


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    wait_until_idle(service)


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def written(loaded, prompt=PROMPT, new=12, seed=0, **options):
    """The text of `generate`."""
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt])
    torch.manual_seed(seed)
    options = {"do_sample": False} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, top_k=0, **options)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_completion(client, service, loaded):
    """Of the one model; its events are JSON, in any language, until [DONE]."""
    assert [model.id for model in client.models.list()] == [service.name]
    assert client.models.retrieve(service.name).id == service.name
    done = client.completions.create(model=service.name, prompt=PROMPT, **GREEDY)
    assert done.choices[0].text == written(loaded) and done.choices[0].finish_reason == "length"
    read = len(loaded[1](PROMPT)["input_ids"])
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (read, 12, read + 12)
    body = {"model": service.name, "prompt": PROMPT, "stream": True} | GREEDY
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def test_prompts_and_answers(client, service, loaded):
    """Several prompts, of text and of tokens; several answers have seeds one after the other."""
    prompts = [PROMPT, "Pack my box"]
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    done = client.completions.create(
        model=service.name, prompt=prompts, n=2, seed=5, max_tokens=9, temperature=0.8, top_p=0.9
    )
    expected = [written(loaded, prompts[i // 2], 9, 5 + i, **options) for i in range(4)]
    assert [choice.text for choice in done.choices] == expected and len(set(expected)) == 4
    tokens = loaded[1](prompts)["input_ids"]
    for given, texts in ((tokens, prompts), (tokens[0], prompts[:1])):
        done = client.completions.create(model=service.name, prompt=given, **GREEDY)
        assert [choice.text for choice in done.choices] == [written(loaded, text) for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, service, loaded, stream):
    """The text ends before the first of them, which never appears in a stream, not even in part."""
    whole = written(loaded, new=60)
    stop = whole[20:23]
    end = min(whole.find(stop), 20)
    done = client.completions.create(
        model=service.name, prompt=PROMPT, temperature=0, max_tokens=60, stop=[stop, "never there"], stream=stream
    )
    if stream:
        *pieces, last = [chunk.choices[0] for chunk in done]
        assert "".join(piece.text for piece in [*pieces, last]) == whole[:end] and last.finish_reason == "stop"
        assert all(piece.finish_reason is None for piece in pieces)
    else:
        assert done.choices[0].text == whole[:end] and done.choices[0].finish_reason == "stop"
        assert done.usage.completion_tokens < 60


def test_a_stream(client, service, loaded):
    stream = client.completions.create(
        model=service.name, prompt=PROMPT, n=2, stream=True, stream_options={"include_usage": True},
        temperature=0, max_tokens=100,
    )  # fmt: skip
    texts, chunks = ["", ""], list(stream)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [written(loaded, new=100)] * 2 and len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == 200 and chunks[-1].choices == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client, service, loaded, stream):
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}, {"role": "assistant", "content": "x"}]
    done = client.chat.completions.create(model=service.name, messages=messages, stream=stream, **GREEDY)
    expected = written(loaded, loaded[1](f"<s>{PROMPT}</s><s>x</s><s>")["input_ids"])
    if stream:
        first, *others = [chunk.choices[0] for chunk in done]
        assert first.delta.role == "assistant" and others[-1].finish_reason == "length"
        assert "".join(one.delta.content or "" for one in others) == expected
    else:
        assert done.choices[0].message.content == expected and done.object == "chat.completion"


def test_an_end_of_the_text(client, service, loaded, monkeypatch):
    """The token that ends a text is not in it."""
    model = service.engine.scheduler.model
    ids = loaded[1](PROMPT)["input_ids"]
    third = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0, len(ids) + 2].item()
    monkeypatch.setattr(model.generation_config, "eos_token_id", third)
    done = client.completions.create(model=service.name, prompt=PROMPT, **GREEDY)
    assert done.choices[0].finish_reason == "stop" and done.usage.completion_tokens <= 3


# What clients send that asks for nothing: fields without a value, and those whose value is what happens anyway.
NOTHING = {
    "n": 1, "stream": False, "stop": [], "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
    "logprobs": False, "response_format": {"type": "text"}, "seed": None, "user": None, "stream_options": None,
    "best_of": None, "echo": None, "suffix": None, "functions": None, "top_k": -1, "repetition_penalty": 1.0,
    "service_tier": "auto", "store": False, "metadata": {"session": "1"}, "prompt_cache_key": "x",
    "no such field": None,
}  # fmt: skip
NOTHING_OF_A_CHAT = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "top_logprobs": 0,
    "functions": [], "max_completion_tokens": None, "audio": None,
}  # fmt: skip


def test_fields_that_ask_for_nothing(client, service, loaded):
    """As the text without them; an answer is a message of the next request as it came."""
    body = {"model": service.name, "prompt": PROMPT} | GREEDY | NOTHING | {"suffix": "", "stop": "", "best_of": 1}
    answer = httpx.post(f"{service.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == written(loaded)
    message = {"role": "user", "content": "The", "name": None}
    chat = {"model": service.name, "messages": [message], "temperature": 0, "max_tokens": 3}
    first = client.chat.completions.create(**chat, extra_body=NOTHING | NOTHING_OF_A_CHAT)
    assert first == client.chat.completions.create(**chat).model_copy(
        update={"id": first.id, "created": first.created}
    )
    chat["messages"] += [first.choices[0].message.model_dump(), message]
    chat["messages"][1] |= {"tool_calls": [], "annotations": []}
    assert client.chat.completions.create(**chat, extra_body={"stream_options": {"include_usage": None}}).choices


def test_fields_that_ask_for_something(client, service):
    messages = [{"role": "user", "content": PROMPT}]
    for name, value in (("tools", [{}]), ("logprobs", True), ("response_format", {"type": "json_object"})):
        with pytest.raises(openai.BadRequestError, match=f"`{name}`: must be left out or be "):
            client.chat.completions.create(model=service.name, messages=messages, extra_body={name: value})


LONE_SURROGATES = [
    {"model": "\ud800"}, {"prompt": "a\udfff"}, {"prompt": ["a\udfff"]}, {"stop": ["\udc80"]}, {"user": "\ud800"},
    {"\ud800": 1}, {"logit_bias": {"\ud800": 1}}, {"stream_options": {"\ud800": True}},
    {"messages": [{"role": "\ud800", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
    {"generation_config": '{"a": "\\ud800"}'},
]  # fmt: skip


def test_bodies_that_are_no_text_or_no_json(service):
    """Status 400; lone surrogates are no text, in values and in names."""
    bodies = [b'{"model": "\xed\xa0\x80"}', b"[" * 3000, b'{"metadata":' * 300 + b"1" + b"}" * 300, b"[]", b"1", b"{"]
    bodies = [(route, body) for route in ("v1/completions", "v1/chat/completions") for body in bodies]
    bodies.append(("load_model", json.dumps({"model": "\ud800"})))
    for fields in LONE_SURROGATES:
        chat = {"model": service.name, "messages": [{"role": "user", "content": PROMPT}]}
        bodies.append(("v1/completions", json.dumps({"model": service.name, "prompt": PROMPT} | fields)))
        bodies.append(("v1/chat/completions", json.dumps(chat | fields)))
    with httpx.Client(base_url=service.url, headers={"Content-Type": "application/json"}) as sender:
        for route, body in bodies:
            answer = sender.post(f"/{route}", content=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"], body
            assert error["type"] == "invalid_request_error", body


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
    ({"n": 20}, openai.RateLimitError, "queue_full"),
    ({"stop": ["a"] * 5}, openai.BadRequestError, "stop"),
    ({"echo": True}, openai.BadRequestError, "literal_error"),
    ({"extra_body": {"beams": 3}}, openai.BadRequestError, "extra_forbidden"),
    ({"prompt": "x" * 5000}, openai.APIStatusError, "body_too_large"),
]


def test_what_is_refused(client, service):
    """In OpenAI's form, and nothing of it is left in the queue."""
    for fields, error, code in REFUSED:
        with pytest.raises(error) as raised:
            client.completions.create(**{"model": service.name, "prompt": PROMPT} | GREEDY | fields)
        assert raised.value.code == code and raised.value.body["message"], fields
        assert raised.value.status_code == {openai.APIStatusError: 413}.get(error, raised.value.status_code)
        wait_until_idle(service)


def test_other_errors(client, service, monkeypatch):
    """Routes and bodies that are none, a template that refuses or is missing, a tokenizer that fails."""
    assert httpx.get(f"{service.url}/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found"
    assert httpx.get(f"{service.url}/v1/completions").status_code == 405
    chunked = httpx.post(f"{service.url}/v1/completions", content=iter([b" " * 3000] * 3))
    assert chunked.status_code == 413 and "at most 4,000 bytes" in chunked.json()["error"]["message"]
    chat = {"model": service.name, "messages": [{"role": "system", "content": "x"}]}
    with pytest.raises(openai.BadRequestError, match="no system"):
        client.chat.completions.create(**chat)
    monkeypatch.setattr(service.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        client.chat.completions.create(**chat)
    monkeypatch.setattr(service, "tokens", lambda prompt: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="The server failed"):
        client.completions.create(model=service.name, prompt=PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(client, service, stream):
    """Its text ends, long before its tokens are written; another one goes on."""
    scheduler = service.engine.scheduler
    body = {"model": service.name, "prompt": PROMPT, "max_tokens": 5000, "temperature": 0, "stream": stream}
    with httpx.Client() as other:
        request = other.build_request("POST", f"{service.url}/v1/completions", json=body, timeout=0.4)
        if stream:
            answer = other.send(request, stream=True)
            next(answer.iter_lines())
            requests = scheduler._writing.running()
            answer.close()
        else:
            with pytest.raises(httpx.TimeoutException):
                other.send(request)
            requests = scheduler._writing.requests
    assert client.completions.create(model=service.name, prompt=PROMPT, **GREEDY).usage.completion_tokens == 12
    wait_until_idle(service)
    assert all(len(request.tokens) < 5000 for request in requests)


def test_health_and_metrics(client, service):
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    client.completions.create(model=service.name, prompt=PROMPT, **GREEDY)
    page = httpx.get(f"{service.url}/metrics").text
    for name in ("tnn_texts_running 0.0", "tnn_texts_waiting 0.0", "tnn_state_bytes 0.0", 'route="/v1/completions"'):
        assert name in page
    assert float(re.search(r"^tnn_new_tokens_total (\S+)", page, re.MULTILINE)[1]) >= 12
    assert float(re.search(r"^tnn_first_token_seconds_count (\S+)", page, re.MULTILINE)[1]) >= 1


def test_failures(client, service, folder, monkeypatch):
    """Of one text, whole or in a stream, and of a step, which ends all: the server goes on. Not of the engine."""
    with monkeypatch.context() as patch:
        patch.setattr(Text, "put", lambda text, value: 1 / 0 if value.numel() == 1 else None)
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="not finished: ZeroDivisionError"):
                list(client.completions.create(model=service.name, prompt=PROMPT, stream=stream, **GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "remove_ended", lambda *given: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="not finished: ZeroDivisionError"):
            client.completions.create(model=service.name, prompt=PROMPT, **GREEDY)
    assert service.engine.is_alive
    assert client.completions.create(model=service.name, prompt=PROMPT, **GREEDY).usage.completion_tokens == 12
    with serving(folder) as other:
        other.engine.close()
        answer = httpx.get(f"{other.url}/health")
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"


def test_without_fastapi(monkeypatch):
    """One line, before anything is loaded."""
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "tnn_scripts.serving.server", raising=False)  # another test may have loaded it
    done = run("api.py", "--model_name_or_path", "nowhere", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert 'pip install "modeling-tnn[api]"' in done.stderr


def test_the_program(folder, monkeypatch):
    """It serves, with the limits of its options."""
    import uvicorn

    asked = []

    def look(server):
        asked.append(server.config)

    monkeypatch.setattr(uvicorn.Server, "run", look)
    before = threading.active_count()
    run("api.py", "--model_name_or_path", folder, "--port", 0, "--max_batch_size", 3)
    assert asked[0].host == "127.0.0.1" and threading.active_count() == before
    done = run("api.py", "--model_name_or_path", folder, "--max_waiting", 0, check=False)
    assert done.returncode == 2 and "--max_waiting must be at least 1, got 0" in done.stderr


def test_transformers_chat(service, loaded, monkeypatch, capsys):
    """Its client, unchanged, talks to the server; its settings arrive."""
    cli = pytest.importorskip("transformers.cli.chat")
    said = iter(["The quick brown fox", "!exit"])
    monkeypatch.setattr(cli.RichInterface, "input", lambda self: next(said))
    monkeypatch.setattr(cli.RichInterface, "confirm", lambda self, message: False)
    cli.Chat(service.name, f"{service.url}/v1", ["do_sample=false", "max_new_tokens=12"])
    prompt = loaded[1].apply_chat_template(
        [{"role": "user", "content": "The quick brown fox"}], tokenize=False, add_generation_prompt=True
    )
    assert "".join(written(loaded, prompt).split()) in "".join(capsys.readouterr().out.split())


def test_settings_of_transformers_chat():
    body = {"model": "a", "messages": [{"role": "user", "content": "b"}]}
    sampled = ChatBody(**body, generation_config=json.dumps({"do_sample": True, "max_new_tokens": 7, "top_p": 0.5}))
    assert sampled.most_tokens() == 7 and sampled.sampling() == {
        "do_sample": True, "temperature": 1.0, "top_p": 0.5, "top_k": 0,
    }  # fmt: skip
    assert not ChatBody(**body, generation_config='{"do_sample": false}').sampling()["do_sample"]
    for refused in ('{"num_beams": 2}', '{"temperature": 3}', "no JSON"):
        with pytest.raises(ValueError, match="generation_config|temperature"):
            ChatBody(**body, generation_config=refused)
