"""Chats: the cache continues from turn to turn, with the same results as reading the whole conversation again."""

import io

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.scripts import run, save_model
from modeling_tnn.serving.writing import Conversation

GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
LINES = ["The quick brown fox", "jumps over", "the lazy dog"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}<s>"
# This one leaves out all but the last message: the past changes with every turn.
FORGETFUL = "<s>{{ messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rtf")


def test_turns_are_one_text(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for template, system in ((None, None), (FORGETFUL, None), (TEMPLATE, "Be brief.")):
        tokenizer.chat_template = template
        conversation = Conversation(model, tokenizer, system, GREEDY)
        for line in LINES:
            before = len(conversation.messages)
            text = conversation.answer(line)
            again = model.generate(conversation.ids[:, : -GREEDY["max_new_tokens"]], use_cache=False, **GREEDY)
            assert torch.equal(again, conversation.ids)
            assert [message["content"] for message in conversation.messages[before:]] == [line, text]
    assert "system Be brief." in tokenizer.decode(conversation.ids[0])


def test_program(folder, monkeypatch):
    """An empty line ends it. How to use it is said at the start and on request, beside the text and not in it."""
    for temperature in (0, 0.7):
        monkeypatch.setattr("sys.stdin", io.StringIO("The quick\n/new\nbrown fox\n/help\n\nnot read\n"))
        done = run("chat", f"--model_name_or_path {folder} --max_new_tokens 5 --temperature {temperature}")
        assert len(done.stdout.strip()) > 5
        assert done.stderr.count("plain text, which it continues. /new starts anew, /help shows this, an empty") == 2


REFUSED = [
    ("--temperature -1", "Hello", "--temperature must be at least 0, and --top_p"),
    ("--top_p 0", "Hello", "--top_p in (0, 1], got 1 and 0"),
    # As Python reads them from a terminal or a command line that is not UTF-8.
    ("", "a\udcff", "must be text in UTF-8, got 'a\\udcff'"),
    # The model would never read it.
    ("--system 'Be brief.'", "Hello", "--system must be given with a tokenizer that has a chat template"),
]


def test_refused(folder, monkeypatch):
    for options, line, message in REFUSED:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
        done = run("chat", f"--model_name_or_path {folder} {options}", check=False)
        assert done.returncode == 2 and message in done.stderr, options
