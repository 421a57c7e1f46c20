"""A server of the API in a thread of this process, on a port of its own."""

import contextlib
import threading
import time
from pathlib import Path

from helpers.scripts import free_port
from tnn_scripts.serving.app import Limits, Service, build_app
from tnn_scripts.serving.engine import Engine
from tnn_scripts.serving.served import load_causal, name_of
from tnn_scripts.serving.server import Server


@contextlib.contextmanager
def serving(
    folder: Path, limits: Limits | None = None, server: dict | None = None, key: str | None = None, **settings
):
    """The service of the model in `folder`, with its `url`; `settings` are those of the scheduler."""
    model, tokenizer = load_causal(str(folder), "auto", "cpu")
    service = Service(name_of(str(folder)), Engine(model, **settings), tokenizer, limits or Limits())
    port = free_port()
    server = Server(
        build_app(service, key), "127.0.0.1", port, service.engine.close, **{"drain_seconds": 1} | (server or {})
    )
    service.server = server
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    service.url = f"http://127.0.0.1:{port}"
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join()
        service.engine.close()


def is_idle(service) -> bool:
    """Whether nothing is running, waiting or held."""
    scheduler = service.engine.scheduler
    return not scheduler.has_work and scheduler.state_bytes == 0


def wait_until_idle(service, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not is_idle(service):
        assert time.monotonic() < deadline
        time.sleep(0.01)
