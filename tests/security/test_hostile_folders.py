"""Folders with files of any shape: a program works, or ends with one line that names the folder."""

import io
import json
import random
import shutil
import sys

from tnn_programs.cli.errors import report_errors

import pytest
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from helpers.models import slow
from helpers.scripts import run_script, save_model, write_text
from modeling_tnn import TnnConfig, TnnForCausalLM
from tnn_programs.serving.writing import load_served

VALUES = (None, True, -1, 1, 1e308, float("nan"), "", "x", "\ud800", [], ["x"], [[1]], {}, {"x": 1}, {"a": {"b": [1]}})
TEXTS = ("", "null", "[]", "1", "true", '"x"', "{", "{}", '{"x": 1}', "[{}]", '{"weight_map": []}', "\ufeff{}", "{{ x")
# Files of a folder, and files that change the meaning of others.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FURTHER = ("adapter_config.json", "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json")
NAMES = sorted({*dir(TnnConfig), *TnnConfig().to_dict(), *dir(GenerationConfig), "quantization_config"})
DEEP = '{"id2label": ' + "[" * 100_000 + "]" * 100_000 + "}"
TWICE = '{"model_type": "tnn", "hidden_size": 32, "hidden_size": {}}'


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("saved") / "model", tno_type="rpe", decay=0.9)


def places(document, place=()):
    """The place of every value in a JSON document, as keys and indices; of long lists the first ones."""
    yield place
    inside = document.items() if isinstance(document, dict) else enumerate(document[:20])
    for key, value in inside if isinstance(document, (dict, list)) else ():
        yield from places(value, (*place, key)) if isinstance(value, (dict, list)) else [(*place, key)]


def change_value(file, chance: random.Random):
    document = json.loads(file.read_text())
    *above, last = chance.choice([*places(document)][1:])
    parent = document
    for key in above:
        parent = parent[key]
    if isinstance(parent, dict) and chance.random() < 0.3:
        last = chance.choice(NAMES)
    parent[last] = chance.choice(VALUES)
    file.write_text(json.dumps(document))


def change_weights(file, chance: random.Random):
    how = chance.choice(("nan", "inf", "cut", "bytes"))
    if how in ("nan", "inf"):
        weights = load_file(file)
        changed = weights[chance.choice(sorted(weights))]
        changed.view(-1)[chance.randrange(changed.numel())] = float(how)
        save_file(weights, file, {"format": "pt"})
        return
    content = bytearray(file.read_bytes())
    for _ in range(3):
        content[chance.randrange(4000)] = chance.randrange(256)
    file.write_bytes(content[: chance.randrange(len(content)) if how == "cut" else None])


def spoil(folder, chance: random.Random):
    kind = chance.choice(("value",) * 6 + ("text", "further", "weights"))
    if kind == "value":
        change_value(folder / chance.choice(("config.json", *FILES)), chance)
    elif kind == "weights":
        change_weights(folder / "model.safetensors", chance)
    else:
        (folder / chance.choice(FILES if kind == "text" else FURTHER)).write_text(chance.choice(TEXTS))


PROGRAMS = {
    "generate": ["--prompt", "The", "--max_new_tokens", 2],
    "chat": ["--chat", "--max_new_tokens", 2],
    "evaluate_lm": ["--lengths", 16, "--max_tokens", 40],
    "plan": ["--lengths", 16, "--engines", "ddp"],
    "push_to_hub": ["--repo_id", "user/name", "--dry_run"],
    "served": None,
}


def run_on(program: str, folder):
    """A program on a folder. What it ends with, but for success and one line, is raised."""
    output = folder.with_name("output")
    shutil.rmtree(output, ignore_errors=True)
    if program == "served":
        return report_errors(lambda: load_served(str(folder), "auto", "cpu"))()
    name = {"plan": ["--config_name"], "push_to_hub": []}.get(program, ["--model_name_or_path"])
    options = [*name, folder, *PROGRAMS[program]]
    if program == "evaluate_lm":
        text = write_text(folder.with_name("text.txt"), copies=10)
        options += ["--validation_file", text, "--output_dir", output]
    return run_script("generate" if program == "chat" else program, *options)


def ends_in_one_line(program: str, folder, monkeypatch, capsys) -> str:
    """The line that a program ends with, or an empty text if it works."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n"))
    capsys.readouterr()
    try:
        run_on(program, folder)
    except SystemExit as left:
        line = capsys.readouterr().err.splitlines()[-1]
        assert left.code in (1, 2) and line.startswith("error: ")
        return line
    return ""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("count", [8, *slow(3000)])
def test_any_files(count, saved, tmp_path, monkeypatch, capsys):
    for seed in range(count):
        chance, folder = random.Random(seed), tmp_path / f"folder{seed}"
        shutil.copytree(saved, folder)
        spoil(folder, chance)
        program = chance.choice([*PROGRAMS])
        try:
            ends_in_one_line(program, folder, monkeypatch, capsys)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {program}, {folder}") from error
        shutil.rmtree(folder)


NAMED = [
    ("generate", "config.json", "[]"),
    ("evaluate_lm", "config.json", "null"),
    ("plan", "config.json", "5"),
    ("push_to_hub", "config.json", "true"),
    ("served", "config.json", DEEP),
    ("chat", "config.json", TWICE),
    ("chat", "generation_config.json", '{"temperature": "hot", "do_sample": true}'),
    ("served", "generation_config.json", '{"top_k": []}'),
    ("generate", "tokenizer.json", "[]"),
    ("evaluate_lm", "tokenizer_config.json", '{"tokenizer_class": []}'),
    ("evaluate_lm", "config.json", '{"model_type": "tnn", "dtype": "\\ud800"}'),
    ("generate", "adapter_config.json", "[]"),
    ("served", "model.safetensors", "\x00" * 20),
]


def test_the_file_is_named(saved, tmp_path, monkeypatch, capsys):
    for number, (program, file, text) in enumerate(NAMED):
        folder = shutil.copytree(saved, tmp_path / str(number))
        (folder / file).write_text(text)
        line = ends_in_one_line(program, folder, monkeypatch, capsys)
        assert str(folder) in line and file in line


@pytest.mark.parametrize("program, value", [("generate", "nan"), ("chat", "inf"), ("served", "nan")])
def test_weights_that_are_not_finite(program, value, saved, tmp_path, monkeypatch, capsys):
    """Of any token. Loading finds them first, unless the folder has no summaries."""
    folder = shutil.copytree(saved, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][1 if program == "served" else 40 :] = float(value)
    if program == "served":
        weights["lm_head.weight"][7, 3] = float(value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    sampled = ["--prompt", "The quick", "--max_new_tokens", 9, "--do_sample", "true"]
    monkeypatch.setitem(PROGRAMS, "generate", sampled)
    assert "`embed_tokens` differs first" in ends_in_one_line(program, folder, monkeypatch, capsys)
    (folder / "self_check.json").unlink()
    assert "the model's output is not finite" in ends_in_one_line(program, folder, monkeypatch, capsys)


def test_names_of_the_class(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((saved / "config.json").read_text())
    for name in ("gtu_dim", "to_dict", "__class__", "axis_length", "_automatic", "attribute_map"):
        (folder / "config.json").write_text(json.dumps(config | {name: 5}))
        for loader in (TnnConfig, TnnForCausalLM):
            with pytest.raises(ValueError, match=f"`{name}` is not a field: it belongs to the class TnnConfig"):
                loader.from_pretrained(folder)
