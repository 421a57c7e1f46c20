"""What a server of the API promises: its key, limits of time, a drain, many clients at once."""

import asyncio
import contextlib
import functools
import gc
import json
import random
import signal
import socket
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import free_port, run, save_model, start_script
from modeling_tnn.serving.request import Request

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx2")  # openai brings it
pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("prometheus_client")

from helpers.api_server import serving, wait_until_idle  # noqa: E402
from tnn_programs.cli.serving_arguments import ApiArguments  # noqa: E402
from tnn_programs.serving.engine import Text  # noqa: E402

LONG = {"prompt": "The quick", "max_tokens": 5000, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rpe")


def connect(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.args.port))


def test_a_key(folder, monkeypatch):
    """All routes but /health ask for it; an option or a variable. One that no client could send is refused."""
    with serving(folder, key="a secret") as service:
        assert httpx.get(f"{service.url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer a"}, {"Authorization": "a secret"}, {"X-Key": "a secret"}):
            for path in ("/v1/models", "/metrics", "/nowhere", "//health", "/health/"):
                answer = httpx.get(service.url + path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("bearer", "BEARER ", "Bearer"):
            headers = {"Authorization": f"{scheme} a secret", "Host": "example.org"}
            assert httpx.get(f"{service.url}/v1/models/", headers=headers).status_code == 200
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="a secret", max_retries=0) as client:
            assert client.models.list().data[0].id == service.name
    asked = []
    monkeypatch.setattr("tnn_programs.serving.app.build_app", lambda service, key: asked.append(key))
    monkeypatch.setattr("tnn_programs.serving.server.Server.run", lambda server: None)
    serve = functools.partial(run, "api.py", "--model_name_or_path", folder, "--port", 0, check=False)
    for key in ("a secret", "", "a\nb", "schl\xfcssel", " a"):
        by_option = serve("--api_key", key)
        with monkeypatch.context() as patch:
            patch.setenv("TNN_API_KEY", key)
            by_variable = serve()
        for done, name in ((by_option, "--api_key"), (by_variable, "TNN_API_KEY")):
            if key != "a secret":
                assert done.returncode == 2 and f"error: {name} must be ASCII characters" in done.stderr
    assert asked == ["a secret"] * 2


def test_pages_of_other_sites(folder):
    """Those that are allowed may ask, also where a key is needed; without a key by the names of this machine alone."""
    origin = {"Origin": "https://example.org"}
    asked = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for key, allowed in ((None, []), ("k", ["https://example.org"]), ("k", ["*"]), ("k", ["https://other.org"])):
        with serving(folder, key, allowed_origins=allowed) as service:
            url, answer = f"{service.url}/v1/completions", f"{service.url}/v1/models"
            before = httpx.options(url, headers=asked)
            refused = httpx.get(answer, headers=origin)
            is_allowed = bool(allowed) and "other" not in allowed[0]
            assert (before.status_code == 200) == is_allowed and refused.status_code == (401 if key else 200)
            for one in (before, refused, httpx.get(answer, headers=origin | {"Authorization": "Bearer k"})):
                assert ("access-control-allow-origin" in one.headers) == is_allowed
            if key is None:
                for host in (
                    "evil.example",
                    "evil.example:80",
                    "localhost.evil.example",
                    "127.0.0.1.nip.io",
                    "[",
                    "10.0.0.1",
                ):
                    assert httpx.get(answer, headers={"Host": host}).json()["error"]["code"] == "invalid_host"
                for host in ("localhost", "LOCALHOST:9", "[::1]:80", "127.0.0.1"):
                    assert httpx.get(answer, headers={"Host": host}).status_code == 200
                body = json.dumps(LONG | {"model": service.name, "max_tokens": 1})
                assert httpx.post(url, content=body).status_code == 200  # without a Content-Type
                for headers in (origin, {"Content-Type": "text/plain"}):  # what a page sends without asking
                    assert "Content-Type must be" in httpx.post(url, content=body, headers=headers).text
    with pytest.raises(ValueError, match="without a path, got https://example.org/"):
        ApiArguments(str(folder), allowed_origins=["https://example.org/"])


def test_requests_of_proxies(folder):
    """HEAD, paths that end with a slash, and a body of two lengths, whose connection is closed."""
    with serving(folder) as service:
        for path in ("/health", "/health/", "/v1/models", "/v1/models/", "/metrics", f"/v1/models/{service.name}/"):
            assert httpx.head(service.url + path).status_code == 200 == httpx.get(service.url + path).status_code
        with connect(service) as client:
            lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + lengths + b"0\r\n\r\n")
            received = b"".join(iter(lambda: client.recv(1000), b""))
        assert received.startswith(b"HTTP/1.1 400 ") and b"two_lengths" in received and received.count(b"HTTP/") == 1


WRONG = {
    "completions": ["0.1", "{}", "[]", "1", '"a"'],
    "chat/completions": ["{}", '{"role": "user", "content": "a"}'],
}


def test_large_bodies_that_are_wrong(folder):
    """A request that is refused does not hold up the others, nor does one for thousands of texts."""
    with serving(folder, max_new_tokens=20_000) as service:
        bodies = [
            ("completions", {"prompt": ["The quick"] * 128, "n": 128}),
            ("completions", {"prompt": "a", "stop": [1] * 300_000}),
        ]
        for route, entries in WRONG.items():
            field = "prompt" if route == "completions" else "messages"
            bodies += [(route, {field: [json.loads(entry)] * (10**6 // (len(entry) + 2))}) for entry in entries]
        bodies.append(("chat/completions", {"messages": [{"role": "user", "content": [{}] * 250_000}]}))
        bodies = [(route, json.dumps(body | {"model": service.name})) for route, body in bodies]
        kind = {"Content-Type": "application/json"}
        for route, body in bodies:
            began = time.process_time()
            answer = httpx.post(f"{service.url}/v1/{route}", content=body, headers=kind, timeout=60)
            assert answer.status_code == 400 and len(answer.content) < 500, answer.text
            assert time.process_time() - began < 3, body[:60]


def test_the_time_of_a_request(folder):
    """It ends with an error, and a client need not try again; nothing runs on."""
    with serving(folder, max_new_tokens=5000, max_seconds=1) as service:
        for stream in (False, True):
            body = LONG | {"model": service.name, "stream": stream}
            with httpx.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
                lines = [line for line in answer.iter_lines() if line]
            if stream:
                assert lines[-1] == "data: [DONE]" and len(lines) > 2
            else:
                assert answer.status_code == 504 and answer.headers["X-Should-Retry"] == "false"
            error = json.loads(lines[-2].removeprefix("data: ") if stream else lines[0])["error"]
            assert error["code"] == "timeout" and error["type"] == "server_error"
            wait_until_idle(service)


HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:1\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
)


def test_slow_clients(folder):
    """Who sends half a body gets an answer, however it drips."""
    with serving(folder, read_seconds=0.3) as service, connect(service) as client:
        client.sendall(HALF_A_BODY)
        client.settimeout(0.1)
        received, deadline = b"", time.monotonic() + 5
        while b" 408 " not in received and time.monotonic() < deadline:
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                received += client.recv(1000)
        assert b" 408 " in received


@pytest.mark.parametrize("drain_seconds, stream", [(0.2, False), (0.2, True), (60, True)])
def test_a_shutdown(folder, drain_seconds, stream, caplog):
    """Texts end; those that take longer than the drain end with an error that says so. The log stays empty."""
    tokens = 5000 if drain_seconds < 1 else 100
    answers = []

    def ask(service):
        body = LONG | {"model": service.name, "stream": stream, "max_tokens": tokens}
        answers.append(httpx.post(f"{service.url}/v1/completions", json=body, timeout=60))

    with serving(folder, max_new_tokens=5000, drain_seconds=drain_seconds) as service:
        clients = [threading.Thread(target=ask, args=(service,)) for _ in range(3)]
        for client in clients:
            client.start()
        while service.engine.scheduler.num_running < 3:
            time.sleep(0.01)
    for client in clients:
        client.join()
    for answer in answers:
        if drain_seconds > 1:
            assert answer.status_code == 200 and '"length"' in answer.text
        else:
            assert answer.status_code == (200 if stream else 503) and "the server is shutting down" in answer.text
        assert not stream or answer.text.endswith("data: [DONE]\n\n")
    assert not [record for record in caplog.records if not record.name.startswith("transformers")]


@pytest.mark.slow
def test_two_signals_end_the_program_while_a_stream_runs(folder):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = start_script("api", "--model_name_or_path", folder, "--port", port, "--max_new_tokens", 100_000)
    with server:
        while not is_up(url):
            assert server.poll() is None
            time.sleep(0.1)
        body = {"model": folder.name, "prompt": "The", "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(2):
                server.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert "shutting down" in "".join(lines)
        written = server.stdout.read()
    assert server.returncode == 130 and "Traceback" not in written and written.count("\n") < 12, written


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


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
