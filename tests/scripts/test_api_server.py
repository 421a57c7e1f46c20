"""What a server of the API promises: its key, limits of connections and of time, a drain."""

import functools
import json
import signal
import socket
import threading
import time

import pytest

from helpers.scripts import free_port, run, save_model, start_script

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("prometheus_client")

from helpers.api_server import serving, wait_until_idle  # noqa: E402

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
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="a secret", max_retries=0) as client:
            assert client.models.list().data[0].id == service.name
    asked = []
    monkeypatch.setattr("modeling_tnn.serving.app.build_app", lambda service, key: asked.append(key))
    monkeypatch.setattr("modeling_tnn.serving.server.Server.run", lambda server: None)
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
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
)


def test_slow_clients(folder):
    """Who sends nothing, half a header or half a body is disconnected, however it drips; so is who does not read."""
    with serving(folder, read_seconds=0.3, max_new_tokens=100_000) as service:
        for sent, answered in ((b"", b""), (b"POST /v1/comp", b""), (HALF_A_BODY, b" 408 ")):
            with connect(service) as client:
                client.sendall(sent)
                received, is_open, deadline = b"", True, time.monotonic() + 5
                client.settimeout(0.1)
                while is_open and time.monotonic() < deadline:
                    try:
                        client.sendall(b"x" if sent else b"")
                        part = client.recv(1000)
                        received, is_open = received + part, bool(part)
                    except TimeoutError:
                        continue
                    except OSError:
                        is_open = False
                assert not is_open and answered in received
        body = LONG | {"model": service.name, "stream": True, "max_tokens": 100_000}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            (connection,) = service.server.server_state.connections
            connection.loop.call_soon_threadsafe(connection.pause_writing)  # the buffers of the socket are full
            with pytest.raises(httpx.TransportError):
                list(lines)
        wait_until_idle(service)


def test_many_connections(folder):
    """Above --max_concurrent requests get status 503; it answers again when connections are closed."""
    with serving(folder, max_concurrent=8) as service:
        clients = [connect(service) for _ in range(8)]
        time.sleep(0.2)
        assert httpx.get(f"{service.url}/health").status_code == 503
        for client in clients:
            client.close()
        deadline = time.monotonic() + 5
        while httpx.get(f"{service.url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


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
