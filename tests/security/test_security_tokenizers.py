"""Tokenizers from anywhere: no code of theirs runs, broken ones are errors, ids without embedding are refused."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from helpers.scripts import run_script, save_model, write_config, write_text
from tnn_cli.model_path import check_vocabulary


@pytest.fixture
def folder(tmp_path) -> Path:
    """A causal model with its tokenizer."""
    return save_model(tmp_path / "model", tno_type="rpe", decay=0.9)


def edit(file: Path, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


EVIL = [
    {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
    {"auto_map": {"AutoTokenizer": ["user/evil--evil.Evil", None]}},
    {"tokenizer_class": "evil.Evil"},
    {"tokenizer_class": "../../evil"},
]


@pytest.mark.parametrize("fields", EVIL, ids=lambda fields: str(list(fields.values())[0]))
def test_foreign_code_is_not_run(fields, folder, tmp_path):
    """Nor is what a template asks for: it runs in a sandbox."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    edit(folder / "tokenizer_config.json", lambda content: content.update(fields, chat_template=template))
    transformers_logging.set_verbosity_error()
    for options in ({}, {"trust_remote_code": False}):
        loaded = AutoTokenizer.from_pretrained(folder, **options)
        assert type(loaded).__module__.startswith("transformers.") and loaded("The fox")["input_ids"]
    transformers_logging.set_verbosity_warning()
    with pytest.raises(Exception, match="unsafe"):
        loaded.apply_chat_template([{"role": "user", "content": "x"}])
    assert not (tmp_path / "executed").exists()


def test_broken_files(folder):
    """Of any shape, and with ids that are none: errors."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (folder / name).read_bytes()
        for content in (b"", b"{", b"[1]", b'{"a": "\xff"}', b'{"a":' * 10**5):
            (folder / name).write_bytes(content)
            with pytest.raises((ValueError, TypeError, AttributeError, RecursionError)):
                AutoTokenizer.from_pretrained(folder)
        (folder / name).write_bytes(whole)
    for number in (-3, 2**40):
        edit(folder / "tokenizer.json", lambda content, number=number: content["model"]["vocab"].update(a=number))
        with pytest.raises(Exception, match="expected u32"):
            AutoTokenizer.from_pretrained(folder)


def test_ids_without_embedding(folder):
    """The scripts say so before they begin; the model itself, when it sees one. The ids count and not their number."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    check_vocabulary(tokenizer, size)
    message = f"below vocab_size={size - 1} of the model, got {size - 1} for .* has {size} tokens"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(tokenizer, size - 1)
    edit(folder / "tokenizer.json", lambda content: content["model"]["vocab"].update(a=10**7))
    text, output = write_text(folder.parent / "text.txt"), ["--output_dir", folder.parent / "out"]
    config, model = write_config(folder.parent / "config", vocab_size=300), ["--model_name_or_path", folder]
    for command in (
        ["pretrain", "--config_name", config, "--train_file", text, "--tokenizer_name", folder, *output],
        ["evaluate_lm", *model, "--validation_file", text, *output],
        ["to_recurrent", *model, *output],
        ["generate", *model, "--prompt", "a fox"],
    ):
        with pytest.raises(SystemExit, match="must be below vocab_size=.*, got 10000000 for 'a'"):
            run_script(*command)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="got 10000000 for"):
        check_vocabulary(tokenizer, size + 1)
    with pytest.raises(ValueError, match=r"Entries of `input_ids` must be in \[0, vocab_size=.*, got 10000000"):
        model(**tokenizer("a", return_tensors="pt", return_token_type_ids=False))
