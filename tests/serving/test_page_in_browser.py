"""The page in Chromium, as its users see it; `make test-slow` installs what that needs."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from helpers import processes
from helpers.hub_server import HubServer, environment
from helpers.scripts import ROOT, free_port, program, save_model
from modeling_tnn.compile.browser import save_for_browser
from tnn_programs.serving.engine import Engine
from tnn_programs.serving.page import Writer, build_page
from tnn_programs.serving.writing import load_served

pytest.importorskip("gradio", reason="the page needs Gradio: make test-slow")
httpx = pytest.importorskip("httpx", reason="Gradio brings it: make test-slow")
sync_api = pytest.importorskip("playwright.sync_api", reason="the browser needs Playwright: make test-slow")
expect, pytestmark = sync_api.expect, pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on this machine", allow_module_level=True)


def status_of(address: str) -> int:
    """Of the answer to a request; 0 if there is none."""
    try:
        return httpx.get(address).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def serving(command: list, port: int, log: Path, **options) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a page and the process that serves it, once it does."""
    address = f"http://127.0.0.1:{port}/"
    with log.open("w") as file:
        server = subprocess.Popen([str(part) for part in command], stdout=file, stderr=file, **options)
    try:
        deadline = time.monotonic() + 120
        while status_of(address) != 200:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", tno_type="rpe", decay=0.9)


@pytest.fixture(scope="module")
def server(folder):
    port = free_port()
    options = ["--port", port, "--max_input_tokens", 500, "--max_new_tokens", 100_000, "--device", "cpu"]
    options += ["--max_batch_size", 2]
    command = program("serve", "--model_name_or_path", folder, *options)
    with serving(command, port, folder / "log.txt") as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Tab:
    """The page in a browser context of its own, which is a user."""

    def __init__(self, browser, address: str, **options):
        self.page = browser.new_context(**options).new_page()
        self.requests, self.errors = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.goto(address)
        self.prompt = self.page.get_by_label("Text", exact=True)
        self.status = self.page.locator("#status")

    def write(self, text: str, **settings):
        for name, value in settings.items():
            field = self.page.get_by_role("spinbutton", name=name)
            field.fill(str(value))
            field.blur()
        self.prompt.fill(text)
        self.press("Write")

    def press(self, name: str):
        self.page.get_by_role("button", name=name, exact=True).click()

    def expect(self, line: str, seconds: float = 30):
        expect(self.status).to_contain_text(re.compile(line), timeout=1000 * seconds)

    def text(self) -> str:
        return self.page.locator("#text textarea").input_value()

    def close(self):
        self.page.context.close()


@pytest.fixture
def user(browser, server):
    """Opens tabs; all are closed at the end."""
    tabs = []

    def open_tab(**options) -> Tab:
        tabs.append(Tab(browser, server[0], **options))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.close()


@pytest.mark.parametrize("width, height", [(1400, 900), (390, 844)])
def test_a_text(user, server, width, height):
    """It comes piece by piece; nothing is asked of another machine, and nothing stands beside the window."""
    tab = user(viewport={"width": width, "height": height})
    tab.write("The quick brown", max_new_tokens=300)
    tab.expect(r"Read [0-9]+ tokens in .* s, wrote [0-9]+ tokens at [0-9,]+ tokens per second[.]\s*$")
    first = tab.text()
    tab.expect("wrote 300 tokens at [0-9,]+ tokens per second. Reached max_new_tokens.")
    assert tab.text().startswith(first) and len(tab.text()) > len(first)
    assert all(url.startswith((server[0], "data:", "blob:")) for url in tab.requests) and not tab.errors
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_stop(user, server):
    """The server computes no more. Another text can be written."""
    tab = user()
    tab.write("The quick brown", max_new_tokens=100_000)
    tab.expect("wrote [0-9]{2,} tokens")
    tab.press("Stop")
    tab.expect("Stopped[.]", seconds=5)
    server[1].cpu_percent()
    assert server[1].cpu_percent(1) < 30
    tab.write("Another", max_new_tokens=20)
    tab.expect("wrote 20 tokens at .* Reached")


def test_pictures_and_what_else_is_served(user, server, folder):
    """Pictures of all layers and of each, drawn when its tab is opened; no files, no place for them, no statistics."""
    tab, address = user(), server[0]
    names = ["overview", "layer 0", "layer 1"]
    expect(tab.page.get_by_role("tab")).to_have_text(names)
    for name in names:
        tab.page.get_by_role("tab", name=name).click()
        picture = tab.page.locator("img[src*='.png']:visible")
        expect(picture).to_have_count(1)
        assert picture.evaluate("async picture => (await picture.decode(), picture.naturalWidth)") > 500
    assert httpx.post(f"{address}gradio_api/upload", files={"files": ("a", b"b")}).status_code == 413
    assert status_of(f"{address}gradio_api/file={folder}/config.json") == 403
    assert status_of(f"{address}monitoring") == 403


def test_a_page_that_is_closed_is_forgotten(folder, browser):
    """One that writes and one that waits."""
    model, tokenizer = load_served(str(folder), "auto", "cpu")
    engine = Engine(model, max_batch_size=1)
    page = build_page("tiny", Writer(engine, tokenizer), {}, 100_000)
    _, address, _ = page.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        tabs = [Tab(browser, address), Tab(browser, address)]
        for tab in tabs:
            tab.write("The quick brown", max_new_tokens=100_000)
        tabs[0].expect("wrote [0-9]{2,} tokens")
        tabs[1].expect("Waiting for the model")
        for tab in tabs:
            tab.close()
        deadline = time.monotonic() + 60
        while engine.scheduler.has_work:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        engine.close()
        page.close(verbose=False)


def test_a_space(folder, browser, tmp_path):
    """The program of the guide is a page of the model that is on the Hub."""
    port = free_port()
    with HubServer() as hub:
        known = environment(hub, tmp_path) | {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
        processes.run(program("push_to_hub", folder, "--repo_id", "user/tiny"), check=True, env=known)
        guide = (ROOT / "docs" / "guides" / "serve.md").read_text()
        app = re.search("```text\n(from tnn_programs.*?)```", guide, re.DOTALL)[1]
        (tmp_path / "app.py").write_text(app.replace("USER/NAME", "user/tiny"))
        with serving([sys.executable, "app.py"], port, tmp_path / "log.txt", env=known, cwd=tmp_path) as (address, _):
            tab = Tab(browser, address)
            expect(tab.page.get_by_role("heading", name="tiny")).to_be_visible()
            tab.write("The quick brown", max_new_tokens=5)
            tab.expect("wrote 5 tokens")
            tab.close()


def test_a_page_without_a_server(folder, browser, tmp_path):
    """It writes the tokens of `generate`, with files that lie in its folder."""
    pytest.importorskip("onnxscript")
    model, tokenizer = load_served(str(folder), "auto", "cpu")
    model = model.to_recurrent(8, 16)[0]
    save_for_browser(model, tokenizer, tmp_path)
    guide = (ROOT / "docs" / "guides" / "export.md").read_text()
    commands = re.search(r"(npm pack .*?)python -m http", guide, re.DOTALL)[1].replace("-C site", "-C .")
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the packages of npm are not to be had: {done.stderr[-300:]}")
    command = [sys.executable, "-m", "http.server", port := free_port(), "--directory", tmp_path]
    with serving(command, port, folder / "static.txt") as (address, _):
        tab = Tab(browser, address)
        tab.expect("Ready")
        tab.write("The quick brown", **{"New tokens": 30, "Temperature": 0})
        tab.expect("Read [0-9]+ tokens, wrote 30 in .* seconds", seconds=60)
        inputs = tokenizer("The quick brown", return_tensors="pt")
        expected = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0].tolist()
        assert tab.page.evaluate("window.ids") == expected
        assert tab.prompt.input_value() == tokenizer.decode(expected, skip_special_tokens=True)
        assert all(url.startswith(address) for url in tab.requests)
        tab.close()
