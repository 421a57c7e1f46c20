"""Texts that a page writes: alone, side by side, stopped, long, empty. No browser and no Gradio is needed."""

import copy
import itertools
import socket
import sys
import threading
from pathlib import Path
from threading import Event

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import run, save_model
from tnn_scripts.common.page import PageArguments, draw_kernels, load_writer
from tnn_scripts.common.sessions import Sessions
from tnn_scripts.common.writing import THREAD, Draw, Settings, Writer
from tnn_scripts.plotting.reading import read_model

PROMPT = "The quick brown"
SETTINGS = Settings(max_new_tokens=12, seed=3)


@pytest.fixture(scope="module", params=["rpe", "rtf"])
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tno_type=request.param)


@pytest.fixture(scope="module")
def writer(folder) -> Writer:
    return load_writer(PageArguments(str(folder), max_input_tokens=40, max_new_tokens=5000, device="cpu"))


def written(writer: Writer, prompt: str = PROMPT, settings: Settings = SETTINGS):
    *_, last = writer.write(prompt, settings, Event())
    return last


def generating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def test_the_likeliest_text_is_that_of_generate(writer, folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=12, do_sample=False)
    last = written(writer, settings=Settings(max_new_tokens=12, temperature=0))
    assert last.text == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert (last.read, last.new_tokens, last.is_cut) == (ids.shape[1], 12, False)
    assert last.end == "Reached max_new_tokens." and "wrote 12 tokens at" in str(last)


def test_a_seed_gives_a_text(writer):
    texts = [written(writer, settings=Settings(max_new_tokens=12, seed=seed)).text for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    before = torch.get_rng_state()
    written(writer)
    assert torch.equal(before, torch.get_rng_state()), "the random numbers of the process have no part in it"


def test_draws_have_the_probabilities_of_the_softmax():
    scores = torch.tensor([[0.0, 1.0, -1.0, float("-inf"), 2.0]])
    draw = Draw(0, scores.device)
    tokens = torch.cat([draw(None, scores).argmax(-1) for _ in range(20_000)])
    shares = tokens.bincount(minlength=5) / len(tokens)
    torch.testing.assert_close(shares, scores.softmax(-1)[0], rtol=0, atol=0.015)
    assert shares[3] == 0


def test_temperature_and_top_p(writer):
    """A hot text is another one, and of the smallest share only the likeliest token is left."""
    likeliest = written(writer, settings=Settings(max_new_tokens=12, temperature=0)).text
    assert written(writer, settings=Settings(max_new_tokens=12, top_p=1e-6)).text == likeliest
    assert written(writer, settings=Settings(max_new_tokens=12, temperature=5.0, top_p=1.0)).text != likeliest


def test_texts_side_by_side_are_those_alone(writer):
    """Token by token in turns, from generations that run at the same time."""
    wanted = [("The quick brown", 1), ("Pack my box", 2), ("The quick brown", 3)]
    settings = [Settings(max_new_tokens=25, seed=seed) for _, seed in wanted]
    alone = [written(writer, prompt, each).text for (prompt, _), each in zip(wanted, settings, strict=True)]
    running = [writer.write(prompt, each, Event()) for (prompt, _), each in zip(wanted, settings, strict=True)]
    turns = list(itertools.zip_longest(*running))
    assert [[state for state in states if state][-1].text for states in zip(*turns, strict=True)] == alone
    assert len(set(alone)) == 3


def test_a_text_streams(writer):
    """A state for each token; every text begins as the one before."""
    states = list(writer.write(PROMPT, Settings(max_new_tokens=200), Event()))
    assert len({state.text for state in states}) > 2 and len(states) >= 200
    for state, following in itertools.pairwise(states):
        assert following.text.startswith(state.text) and following.new_tokens >= state.new_tokens
    assert not any(state.end for state in states[:-1])


def test_stop(writer):
    """Soon, though thousands of tokens were asked for; the thread is gone."""
    stop, states = Event(), []
    for state in writer.write(PROMPT, Settings(max_new_tokens=5000), stop):
        states.append(state)
        if len(states) == 3:
            stop.set()
    assert states[-1].end == "Stopped." and states[-1].new_tokens < 500
    assert not generating()


def test_a_reader_who_leaves_ends_the_text(writer):
    stop = Event()
    states = writer.write(PROMPT, Settings(max_new_tokens=5000), stop)
    next(states)
    assert generating()
    states.close()
    assert stop.is_set() and not generating()


def test_an_error_while_it_writes_reaches_the_reader(writer, monkeypatch):
    monkeypatch.setattr(writer.model, "generate", lambda *ids, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(writer.write(PROMPT, SETTINGS, Event()))
    assert not generating()


def test_the_end_of_a_text(writer, monkeypatch):
    """A token that ends texts, here the first that would come."""
    ids, _ = writer.read(PROMPT)
    first = writer.model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1].item()
    monkeypatch.setattr(writer.model.generation_config, "eos_token_id", first)
    last = written(writer, settings=Settings(max_new_tokens=12, temperature=0))
    assert (last.new_tokens, last.end) == (1, "The model ended the text.")


@pytest.mark.parametrize("copies", [20, 3000])
def test_a_long_text_is_read_from_its_end(writer, copies):
    """Of many characters the tokenizer sees the last alone."""
    last = written(writer, f"{PROMPT} fox. " * copies, Settings(max_new_tokens=8, temperature=0))
    assert (last.read, last.is_cut) == (40, True)
    assert "Read the last 40 tokens" in str(last) and "longer than this page reads" in str(last)
    ids = writer.tokenizer(f"{PROMPT} fox. " * 20, return_tensors="pt")["input_ids"][:, -40:]
    output = writer.model.generate(ids, max_new_tokens=8, do_sample=False)
    assert last.text == writer.tokenizer.decode(output[0, 40:], skip_special_tokens=True)


def test_no_text(writer):
    with pytest.raises(ValueError, match="The text must be text in UTF-8"):
        list(writer.write("a\ud800", SETTINGS, Event()))
    with pytest.raises(ValueError, match="The text is empty: write something"):
        list(writer.write("", SETTINGS, Event()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1 up, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 5001}, "max_new_tokens must be at most 5,000, got 5001"),
        ({"seed": -1}, "seed must be a whole number from 0 up, got -1"),
        ({"seed": None}, "seed must be a whole number from 0 up, got None"),
        ({"seed": 2**64}, "seed must be a whole number"),
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": None}, "top_p must be above 0"),
    ],
)
def test_settings_that_are_refused(writer, settings, message):
    """Also by a request that does not come from the page."""
    with pytest.raises(ValueError, match=message):
        list(writer.write(PROMPT, Settings(**settings), Event()))
    given = Settings.__dataclass_fields__ | settings
    given = [getattr(value, "default", value) for value in given.values()]
    ((text, line),) = Sessions(writer).write("one", PROMPT, *given)
    assert text == "" and message.split(",")[0] in line


def test_a_new_text_of_a_session_ends_the_one_before(writer):
    """And shows nothing of it any more; those of others go on."""
    sessions = Sessions(writer)
    sessions.begin("one"), sessions.begin("two")
    first = sessions.write("one", PROMPT, 5000, 1.0, 0.95, 0)
    other = sessions.write("two", PROMPT, 25, 1.0, 0.95, 0)
    next(first), next(other)
    assert sessions.begin("one")[0] == ""
    assert list(first) == []
    second = sessions.write("one", PROMPT, 12, 1.0, 0.95, 3)
    assert list(second)[-1][0] == written(writer).text
    assert "wrote 25 tokens" in list(other)[-1][1]
    assert not sessions.stops and not generating()


def test_stop_of_a_session(writer):
    sessions = Sessions(writer)
    sessions.begin("one")
    sessions.stop("one"), sessions.stop("nobody")  # while it waits
    *_, (_, line) = sessions.write("one", PROMPT, 5000, 1.0, 0.95, 0)
    assert "wrote 1 token. Stopped." in line
    running = sessions.write("one", PROMPT, 5000, 1.0, 0.95, 0)
    next(running)
    sessions.stop("one")
    assert "Stopped." in list(running)[-1][1]
    assert not sessions.stops and not generating()


@pytest.mark.parametrize("leave", [lambda sessions: sessions.leave("one"), Sessions.leave_all])
def test_a_page_that_is_closed_ends_its_text(writer, leave):
    sessions = Sessions(writer)
    sessions.begin("one")
    running = sessions.write("one", PROMPT, 5000, 1.0, 0.95, 0)
    next(running)
    leave(sessions)
    assert list(running) == [] and not sessions.stops and not generating()


def test_pictures_of_the_kernels(tmp_path):
    """Of a model in another precision, which it keeps."""
    folder = save_model(tmp_path / "model", tno_type="rpe", num_hidden_layers=1)
    model = load_writer(PageArguments(str(folder), dtype="bfloat16")).model
    kernels, _ = read_model(model.base_model, 32)
    expected, _ = read_model(copy.deepcopy(model).float().base_model, 32)
    assert (kernels[0].taps == expected[0].taps).all() and model.dtype == torch.bfloat16
    pictures = draw_kernels(model, tmp_path)
    assert [label for _, label in pictures] == ["all layers", "layer 0"]
    for path, _ in pictures:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_a_model_that_has_no_page(tmp_path):
    folder = save_model(tmp_path, tno_type="rpe")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"causal": true', '"causal": false'))
    with pytest.raises(ValueError, match="is a bidirectional TNN: only a causal TNN"):
        load_writer(PageArguments(str(folder)))


def test_without_gradio(monkeypatch):
    """One line, before anything is loaded."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = run("serve.py", "--model_name_or_path", "nowhere", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert 'pip install "modeling-tnn[space]"' in done.stderr


def test_an_address_that_is_taken(monkeypatch):
    """It is said before the model is loaded."""
    monkeypatch.setattr("tnn_scripts.common.page.import_gradio", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve.py", "--model_name_or_path", "nowhere", "--port", port, check=False)
    assert done.returncode == 1 and f"error: --host 127.0.0.1 --port {port} cannot be served: " in done.stderr


@pytest.mark.parametrize("program", ["serve.py", "api.py"])
def test_a_port_that_is_none(program, monkeypatch):
    monkeypatch.setattr("tnn_scripts.common.page.import_gradio", lambda: None)
    done = run(program, "--model_name_or_path", "nowhere", "--port", 70000, check=False)
    assert done.returncode == 2 and "error: --port must be from 0 to 65535, got 70000" in done.stderr


@pytest.mark.parametrize("given", [[], ["--overwrite_output_dir"]])
def test_the_demo_and_its_page(folder, given, monkeypatch):
    """It is trained first; where there is a model already, the error says how to serve that one."""
    done, page = [], "tnn_scripts.runs.demo"
    monkeypatch.setattr(f"{page}.import_gradio", lambda: None)
    monkeypatch.setattr(f"{page}.run", lambda args, config: done.append("trained"))
    monkeypatch.setattr(f"{page}.serve", lambda args: done.append(args.model_name_or_path))
    ended = run("demo.py", "--serve", "--output_dir", folder, *given, check=False)
    if given:
        assert (ended.returncode, done) == (0, ["trained", str(folder)])
    else:
        assert (ended.returncode, done) == (2, [])
        assert f"`tnn serve --model_name_or_path {folder}` serves it." in ended.stderr


def test_the_demo_without_gradio(monkeypatch, tmp_path):
    """It ends before the training."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = run("demo.py", "--serve", "--output_dir", tmp_path / "out", check=False)
    assert done.returncode == 1 and 'pip install "modeling-tnn[space]"' in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["max_input_tokens", "max_new_tokens", "concurrency_limit"])
def test_limits_that_are_none(name):
    done = run("serve.py", "--model_name_or_path", "nowhere", f"--{name}", 0, check=False)
    assert done.returncode == 2 and f"--{name} must be at least 1, got 0" in done.stderr
