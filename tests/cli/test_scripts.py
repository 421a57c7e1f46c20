"""The programs around a trained model: demo, generate, convert, benchmark."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from helpers.scripts import TEXT, read, run, save_model, write_config, write_text
from tnn_programs.cli.generation_fields import FIELDS
from tnn_programs.cli.sampling import OF_SAMPLING, sampling
from tnn_programs.serving.writing import load_writer, sampling_of


def test_the_demo_learns_what_it_reads(tmp_path, caplog):
    """A model that has seen three sentences 400 times knows them."""
    preset = write_config(tmp_path / "preset", vocab_size=400, hidden_dropout_prob=0.0)
    text, output = write_text(tmp_path / "text.txt", copies=400), tmp_path / "out"
    options = f"--config_name {preset} --output_dir {output} --dataset_name {text} --config_overrides tno_type=fd"
    options += " --max_steps 60 --per_device_train_batch_size 8 --learning_rate 0.01 --prompt Pack --max_new_tokens 12"
    caplog.set_level("INFO", "demo")
    run("demo", options)
    metrics = read(output, "metrics")
    assert metrics["perplexity_before"] > 100 > 3 > metrics["perplexity"]
    assert metrics["tokens"] == 60 * 8 * 32 and read(output, "training_args")["config_overrides"] == "tno_type=fd"
    assert "Pack my box with five dozen jugs" in metrics["text"] and metrics["text"] in caplog.text
    assert AutoModelForCausalLM.from_pretrained(output).config.tno_type == "fd"
    assert AutoTokenizer.from_pretrained(output).decode([0]) == "<s>"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rpe", decay=0.9)


@pytest.fixture
def generate(model_folder, tmp_path):
    """Call the program; returns what it writes into its file, and on stdout."""

    def call(*options, model=model_folder):
        output = tmp_path / "texts.json"
        ran = run("generate", f"--model_name_or_path {model} --output_file {output}", *options)
        return json.loads(output.read_text()), ran.stdout

    return call


PROMPTS = ["--prompt", "The quick", "--prompt", "A dog"]


def test_generate(generate):
    """Fields of GenerationConfig, `--name=value` too; a largest length in place of new tokens; ends of a text."""
    options = [*PROMPTS, "--max_new_tokens 9 --do_sample true --top_p 0.9 --eos_token_id null"]
    result, shown = generate(*options)
    assert "The quick" in shown and "tokens per second" in shown
    assert result["options"]["top_p"] == 0.9 and result["options"]["do_sample"] is True
    assert [text[:5] for text in result["texts"]] == ["The q", "A dog"]
    assert generate(*options)[0]["texts"] == result["texts"]
    assert generate(*PROMPTS, "--max_length=12", "--top_k=5")[0]["options"] == {"max_length": 12, "top_k": 5}
    (text, _) = generate(*PROMPTS, "--stop_strings ' ' --max_new_tokens 40")[0]["texts"]
    assert len(text) < 60


def test_sampling_is_the_default(model_folder, generate, tmp_path):
    """Unless the likeliest tokens, beams or the like are asked for; `generation_config.json` has other defaults."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    of_others = {"temperature": 0.8, "top_k": 30, "num_beams": 4, "num_return_sequences": 2}
    (folder / "generation_config.json").write_text(json.dumps(of_others | {"eos_token_id": None}))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 30}
    for options, expected in (
        ("", sampled),
        ("--temperature 0.7", sampled | {"temperature": 0.7}),
        ("--temperature 0 --top_p 0.5", {"do_sample": False}),
        ("--num_beams 2", {"do_sample": False, "num_beams": 2}),
    ):
        found, _ = generate(*PROMPTS[:2], f"--max_new_tokens 30 --eos_token_id null {options}", model=folder)
        set_seed(0)
        inputs = tokenizer("The quick", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=30, eos_token_id=None, **expected)
        assert found["texts"] == tokenizer.batch_decode(output), options
    served, _ = load_writer(str(folder), "auto", "cpu")
    assert sampling_of(served).items() >= sampled.items() and sampling()["temperature"] == 1, "api, page and chat"
    assert served.lm_head.weight.stride(0) == 1, "by columns"


# A value of each kind, and those that made requests fail, end at once or never.
OF_KINDS = {"int": 2, "float": 0.5, "bool": True, "str": "a", "list": [[3]], "tuple": [2, 1.5], "dict": {"a": 1}}
HOSTILE = {"num_beams": 10**5, "max_time": 1e-9, "assistant_early_exit": 1, "prompt_lookup_num_tokens": 3}
HOSTILE |= {"max_length": 1, "min_length": 10**6, "repetition_penalty": 0.01, "suppress_tokens": list(range(290))}


def test_what_counts_of_a_generation_config(model_folder, tmp_path):
    """Special tokens and sampling; of every other field the value is refused by name, or does not count."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    values = [(field, OF_KINDS[kind]) for field, kinds in FIELDS.items() for kind in kinds]
    assert len({field for field, _ in values}) > 50
    ids, counting = {"bos_token_id": 4, "eos_token_id": [5, 6], "pad_token_id": 1}, {}
    for field, value in [*values, *HOSTILE.items()]:
        (folder / "generation_config.json").write_text(json.dumps({field: value} | ids))
        try:
            model, _ = load_writer(str(folder), "auto", "cpu")
        except ValueError as error:
            assert "generation_config.json" in str(error) or field in str(error)
            continue
        counting[field] = value
        assert model.generation_config.to_diff_dict().items() >= ids.items() and model.generation_config.eos_token_id
        kept = {name for name, value in vars(model.generation_config).items() if value and name[0] != "_"}
        kept -= {"do_sample", "transformers_version"}
        assert kept == ({*ids, field} if field in OF_SAMPLING else {*ids})
    assert counting.keys() >= HOSTILE.keys()
    for wrong in ({"temperature": -1.0}, {"eos_token_id": True}, {"pad_token_id": 10**6}, {"top_k": []}):
        (folder / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"generation_config.json.*`{next(iter(wrong))}` (must be|\\(=)"):
            load_writer(str(folder), "auto", "cpu")


def test_generate_from_a_file_in_batches(generate, tmp_path):
    """Greedy, so that one by one and batched are the same."""
    (tmp_path / "prompts.txt").write_text("The quick\n\nA dog jumps over\nThe\n")
    options = f"--prompt_file {tmp_path}/prompts.txt --max_new_tokens 8 --do_sample false --batch_size "
    texts = generate(options + "1")[0]["texts"]
    assert len(texts) == 3 and texts == generate(options + "3")[0]["texts"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_generate_from_the_standard_input(model_folder, generate, monkeypatch):
    """Each line is a prompt of its own, until an empty one; on a terminal, a mark says where to write."""
    options = "--max_new_tokens 5 --do_sample false"
    given, _ = generate(*PROMPTS, options)
    for kind, marks in ((io.StringIO, 0), (Terminal, 3)):
        monkeypatch.setattr(sys, "stdin", kind("The quick\nA dog\n\nnot read\n"))
        lines, written = generate(options)
        assert lines["texts"] == given["texts"] and lines["prompts"] == PROMPTS[1::2]
        assert written.count("> ") == marks
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert run("generate", f"--model_name_or_path {model_folder}").returncode == 0


def test_to_recurrent(model_folder, tmp_path):
    """To modal operators; RTF is a recurrence already."""
    (tmp_path / "text.txt").write_text(TEXT * 8)
    output = tmp_path / "converted"
    result = run("to_recurrent", f"--model_name_or_path {model_folder} --output_dir {output} --rows 2 --order 16",
                 f"--dataset_name {tmp_path}/text.txt")  # fmt: skip
    report = read(output, "conversion")
    comparison = report["comparison"]
    assert abs(comparison["perplexity_change"]) < 1e-3 and comparison["top1_agreement"] > 0.99
    assert comparison["tokens"] == 2 * 8 * 32
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert "top-1 agreement" in result.stdout
    converted = AutoModelForCausalLM.from_pretrained(output)
    assert converted.config.tno_type == "modal"
    assert converted.generate(torch.tensor([[5, 6]]), max_new_tokens=3, eos_token_id=None).shape == (1, 5)
    folder = save_model(tmp_path / "model", tno_type="rtf")
    result = run("to_recurrent", f"--model_name_or_path {folder} --output_dir {tmp_path}/out",
                 f"--dataset_name {tmp_path}/text.txt")  # fmt: skip
    assert "recurrence already" in result.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tno_type == "rtf"
