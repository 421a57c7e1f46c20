"""Texts that a page writes: alone, side by side, stopped, long, empty. No browser and no Gradio is needed."""

import asyncio
import copy
import sys

import pytest
import torch

from helpers.api_server import wait_until_idle
from helpers.scripts import run, save_model
from modeling_tnn.serving.request import Request
from tnn_programs.plotting.figures import save_all
from tnn_programs.plotting.reading import read_model
from tnn_programs.serving.engine import Engine
from tnn_programs.serving.page import WAITING, Writer, stopped
from tnn_programs.serving.writing import load_served

PROMPT, LONG = "The quick brown", 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rpe")


@pytest.fixture(scope="module")
def shared_writer(folder):
    model, tokenizer = load_served(str(folder), "auto", "cpu")
    engine = Engine(model, max_batch_size=2, max_waiting=1)
    yield Writer(engine, tokenizer, max_input_tokens=40)
    engine.close()


@pytest.fixture
def writer(shared_writer):
    """Nothing is left in it after a test."""
    yield shared_writer
    wait_until_idle(shared_writer)


def begin(writer: Writer, prompt: str = PROMPT, most: int = 12, temperature=1.0, top_p=0.95, seed=3):
    return writer.write(prompt, most, temperature, top_p, seed)


async def states_of(states) -> list[tuple[str, str]]:
    return [state async for state in states]


def written(*given, **settings) -> tuple[str, str]:
    """The last state."""
    return asyncio.run(states_of(begin(*given, **settings)))[-1]


def generated(writer: Writer, prompt: str, seed: int | None = None, **options) -> str:
    """The text of `generate` in transformers."""
    ids = writer.tokenizer(prompt, return_tensors="pt")["input_ids"][:, -writer.max_input_tokens :]
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        output = writer.engine.scheduler.model.generate(ids, max_new_tokens=12, do_sample=seed is not None, **options)
    return writer.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_texts_are_those_of_generate(writer):
    """The likeliest ones and those of a seed, temperature and top_p; they stream, each beginning as the one before."""
    text, line = written(writer, temperature=0)
    assert text == generated(writer, PROMPT)
    assert line.startswith(f"Read {len(writer.tokenizer(PROMPT)['input_ids'])} tokens in ")
    assert "wrote 12 tokens at" in line and line.endswith("Reached max_new_tokens.")
    settings = {"temperature": 1.5, "top_p": 0.8}
    texts = [written(writer, seed=seed, **settings)[0] for seed in (1, 2)]
    assert texts == [generated(writer, PROMPT, seed, top_k=0, **settings) for seed in (1, 2)]
    assert len({text, *texts}) == 3
    states = asyncio.run(states_of(begin(writer, most=400)))
    assert states[0] == ("", WAITING) and len({text for text, _ in states}) > 3
    assert all(after.startswith(before) for (before, _), (after, _) in zip(states, states[1:], strict=False))
    assert not any("Reached" in line for _, line in states[:-1])


def test_readers_who_leave(writer):
    """They end a text that is written and one that waits; who comes when too many wait is told to come back."""

    async def leave_all():
        texts = [begin(writer, most=LONG) for _ in range(3)]
        for states in texts[:2]:
            await anext(states), await anext(states)  # it is written
        waiting = asyncio.create_task(states_of(texts[2]))
        while not writer.engine.scheduler.num_waiting:
            await asyncio.sleep(0.01)
        full = (await states_of(begin(writer)))[-1]
        waiting.cancel()
        for states in texts[:2]:
            await states.aclose()
        while writer.engine.scheduler.has_work:
            await asyncio.sleep(0.01)
        return full

    assert asyncio.run(leave_all()) == ("", "1 texts are waiting for their turn. Try again later.")
    assert [stopped(line) for line in (WAITING, "Read 3 tokens.", "A. Reached max_new_tokens.")] == [
        " Stopped.", "Read 3 tokens. Stopped.", "A. Reached max_new_tokens."
    ]  # fmt: skip


def test_the_end_of_a_text(writer, monkeypatch):
    """A token that ends texts, here the first that would come; an error reaches the reader."""
    model = writer.engine.scheduler.model
    ids = torch.tensor([writer.read(PROMPT)[0]])
    first = model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1].item()
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    assert written(writer, temperature=0)[1].endswith("wrote 1 token. The model ended the text.")
    monkeypatch.setattr(Request, "choose", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(writer)


def test_what_is_read(writer):
    """The end of a long text, of which the tokenizer sees the last characters alone; what is no text is refused."""
    for copies in (20, 3000):
        text, line = written(writer, prompt=f"{PROMPT} fox. " * copies, temperature=0)
        assert "Read the last 40 tokens" in line and "longer than this page reads" in line
        assert text == generated(writer, f"{PROMPT} fox. " * 20)
    for given, message in (
        ({"prompt": "a\ud800"}, "The text must be text in UTF-8"),
        ({"prompt": ""}, "The text is empty: write something"),
        ({"temperature": float("nan")}, "`temperature`"),  # a browser cannot send it
    ):
        text, line = written(writer, **given)
        assert text == "" and message in line


@pytest.mark.slow
def test_pictures_of_the_kernels(tmp_path):
    """Of a model in another precision, which it keeps. A bidirectional one has no page."""
    folder = save_model(tmp_path / "model", tno_type="rpe", num_hidden_layers=1)
    model, _ = load_served(str(folder), "bfloat16", None)
    kernels, _ = read_model(model.base_model, 32)
    expected, _ = read_model(copy.deepcopy(model).float().base_model, 32)
    assert (kernels[0].taps == expected[0].taps).all() and model.dtype == torch.bfloat16
    pictures = save_all(kernels, "Kernels", tmp_path)
    assert {label: path.name for label, path in pictures.items()} == {
        "overview": "overview.png",
        "layer 0": "layer-0.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"causal": true', '"causal": false'))
    with pytest.raises(ValueError, match="no causal model .*: only a causal model"):
        load_served(str(folder), "auto", None)


def test_what_does_not_start(monkeypatch):
    """One line, before anything is loaded: no Gradio, a wrong number."""
    model = ["--model_name_or_path", "nowhere"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gradio", None)
        done = run("serve.py", *model, check=False)
        last = done.stderr.splitlines()[-1]  # after the line that the Hub is tried
        assert done.returncode == 1 and "Traceback" not in done.stderr and last.startswith("error: ")
        assert 'pip install "modeling-tnn[space]"' in last
    done = run("serve.py", *model, "--max_input_tokens", 0, check=False)
    assert done.returncode == 2 and "error: --max_input_tokens must be at least 1, got 0" in done.stderr
