"""Tokenizers from anywhere: no code of theirs runs, broken ones are errors, ids without embedding are refused."""

import copy
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from helpers.scripts import run_script, save_model, write_config, write_text
from tnn_scripts.data.vocabulary import check_vocabulary


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
@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}], ids=["default", "not trusted"])
def test_foreign_code_is_not_run(fields, options, folder, tmp_path):
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    edit(folder / "tokenizer_config.json", lambda content: content.update(fields))
    transformers_logging.set_verbosity_error()
    loaded = AutoTokenizer.from_pretrained(folder, **options)
    transformers_logging.set_verbosity_warning()
    assert type(loaded).__module__.startswith("transformers.") and loaded("The fox")["input_ids"]
    assert not (tmp_path / "executed").exists()


def test_templates_run_in_a_sandbox(folder):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    edit(folder / "tokenizer_config.json", lambda content: content.update(chat_template=template))
    with pytest.raises(Exception, match="unsafe"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "x"}])


BROKEN = [b"", b"{", b"[1]", b'{"a": "\xff"}', b'{"a":' * 10**5]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", BROKEN, ids=["empty", "cut", "list", "no utf-8", "deep"])
def test_broken_files(name, content, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(Exception) as error:
        AutoTokenizer.from_pretrained(folder)
    assert isinstance(error.value, ValueError | TypeError | AttributeError | RecursionError)


@pytest.mark.parametrize("number", [-3, 2**40])
def test_ids_that_are_none(number, folder):
    edit(folder / "tokenizer.json", lambda content: content["model"]["vocab"].update(a=number))
    with pytest.raises(Exception, match="expected u32"):
        AutoTokenizer.from_pretrained(folder)


def run_options(folder: Path) -> dict[str, list]:
    """The options of each script for the model in `folder`."""
    text = write_text(folder.parent / "text.txt")
    causal = write_config(folder.parent / "config", vocab_size=300)
    output = ["--output_dir", folder.parent / "out"]
    return {
        "pretrain": ["--config_name", causal, "--train_file", text, "--tokenizer_name", folder, *output],
        "evaluate_lm": ["--model_name_or_path", folder, "--validation_file", text, *output],
        "to_recurrent": ["--model_name_or_path", folder, *output],
        "generate": ["--model_name_or_path", folder, "--prompt", "a fox"],
    }


def move_letter(content: dict):
    """Another token for `a` than the model has."""
    content["model"]["vocab"]["a"] = 10**7


@pytest.mark.parametrize("script", ["pretrain", "evaluate_lm", "to_recurrent", "generate"])
def test_ids_without_embedding(script, folder):
    """The scripts say so before they begin; the model itself, when it sees one."""
    edit(folder / "tokenizer.json", move_letter)
    with pytest.raises(SystemExit, match="must be below vocab_size=.*, got 10000000 for 'a'"):
        run_script(script, *run_options(folder)[script])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"Entries of `input_ids` must be in \[0, vocab_size=.*, got 10000000"):
        model(**tokenizer("a", return_tensors="pt", return_token_type_ids=False))


def test_ids_count_and_not_their_number(folder):
    """A vocabulary with a gap has fewer tokens than its highest id says."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    check_vocabulary(tokenizer, size)
    with pytest.raises(
        ValueError, match=f"below vocab_size={size - 1} of the model, got {size - 1} for .* has {size} tokens"
    ):
        check_vocabulary(tokenizer, size - 1)
    with_gap = copy.deepcopy(json.loads((folder / "tokenizer.json").read_text()))
    move_letter(with_gap)
    (folder / "tokenizer.json").write_text(json.dumps(with_gap))
    with pytest.raises(ValueError, match="got 10000000 for"):
        check_vocabulary(AutoTokenizer.from_pretrained(folder), size + 1)
