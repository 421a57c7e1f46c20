"""Chats: the cache continues from turn to turn, with the same results as reading the whole conversation again."""

import io

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import run, run_script, save_model
from tnn_scripts.serving.writing import Conversation

GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
LINES = ["The quick brown fox", "jumps over", "the lazy dog"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}<s>"
# This one leaves out all but the last message: the past changes with every turn.
FORGETFUL = "<s>{{ messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), tno_type="rtf")
    return folder, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [None, TEMPLATE, FORGETFUL], ids=["plain", "template", "forgetful"])
def test_turns_are_one_text(loaded, template):
    _, model, tokenizer = loaded
    tokenizer.chat_template = template
    conversation = Conversation(model, tokenizer, None, GREEDY)
    for line in LINES:
        before = len(conversation.messages)
        text = conversation.answer(line)
        prompt = conversation.ids[:, : -GREEDY["max_new_tokens"]]
        again = model.generate(prompt, use_cache=False, **GREEDY)
        assert torch.equal(again, conversation.ids)
        assert [message["content"] for message in conversation.messages[before:]] == [line, text]
    tokenizer.chat_template = TEMPLATE
    first = Conversation(model, tokenizer, "Be brief.", GREEDY)
    first.answer("Hello")
    assert "system Be brief." in tokenizer.decode(first.ids[0])


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_program(loaded, temperature, monkeypatch, capsys):
    """An empty line ends it. How to use it is said at the start and on request, beside the text and not in it."""
    monkeypatch.setattr("sys.stdin", io.StringIO("The quick\n/new\nbrown fox\n/help\n\nnot read\n"))
    run_script("chat", "--model_name_or_path", loaded[0], "--max_new_tokens", 5, "--temperature", temperature)
    written = capsys.readouterr()
    assert len(written.out.strip()) > 5
    assert written.err.count("plain text, which it continues. /new starts anew, /help shows this, an empty line") == 2


REFUSED = [
    (["--max_new_tokens", 0], "Hello", "must be at least 1"),
    (["--temperature", -1], "Hello", "must be at least"),
    (["--temperature", "nan"], "Hello", "must be at least"),
    (["--top_p", 0], "Hello", "must be"),
    # As Python reads them from a terminal or a command line that is not UTF-8.
    ([], "a\udcff", "must be text in UTF-8, got 'a\\udcff'"),
    (["--system", "a\udcff"], "a", "must be text in UTF-8, got 'a\\udcff'"),
    # The model would never read it.
    (["--system", "Be brief."], "Hello", "--system must be given with a tokenizer that has a chat template"),
]


def test_refused(loaded, monkeypatch):
    for options, line, message in REFUSED:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
        done = run("chat", "--model_name_or_path", loaded[0], *options, check=False)
        assert done.returncode == 2 and message in done.stderr, options
