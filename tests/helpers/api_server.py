"""A server of the API in a thread of this process, on a port of its own."""

import contextlib
import threading
import time
from pathlib import Path

from helpers.scripts import free_port
from tnn_programs.cli.serving_arguments import ApiArguments
from tnn_programs.serving.app import build_app
from tnn_programs.serving.server import Server
from tnn_programs.serving.service import Service


@contextlib.contextmanager
def serving(folder: Path, key: str | None = None, **options):
    """The service of the model in `folder`, with its `url` and these options of `tnn api`."""
    args = ApiArguments(str(folder), **{"device": "cpu", "port": free_port(), "drain_seconds": 1} | options)
    service = Service(args)
    service.server = server = Server(build_app(service, key), args, service.engine.close)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    service.url = f"http://127.0.0.1:{args.port}"
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
