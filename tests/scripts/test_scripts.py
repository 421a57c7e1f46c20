"""The scripts around a trained model: generate, convert, benchmark."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from helpers.models import exhaustive, tiny_config
from helpers.scripts import TEXT, run, save_model, table_rows
from modeling_tnn.tno_auto import build_tno
from tnn_scripts.common.sampling import sampling

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rpe", decay=0.9)


def test_generate(model_folder, tmp_path):
    output = tmp_path / "result.json"
    options = ["--model_name_or_path", model_folder, "--max_new_tokens", 9, "--do_sample", "true", "--top_p", 0.9]
    options += ["--eos_token_id", "null", "--output_file", output]
    streamed = run("generate.py", *options, "--prompt", "The quick", "--prompt", "A dog")
    assert "The quick" in streamed.stdout and "tokens per second" in streamed.stdout
    result = json.loads(output.read_text())
    assert result["options"]["top_p"] == 0.9 and result["options"]["do_sample"] is True
    assert [text[:5] for text in result["texts"]] == ["The q", "A dog"]
    again = run("generate.py", *options, "--prompt", "The quick", "--prompt", "A dog")
    assert json.loads(output.read_text())["texts"] == result["texts"], again.stdout


def test_fields_of_generation_config(model_folder, tmp_path):
    """`--name=value` too; a largest length in place of new tokens; texts that end a sequence."""
    options = ["--model_name_or_path", model_folder, "--prompt", "The quick", "--output_file", tmp_path / "texts.json"]
    run("generate.py", *options, "--max_length=12", "--top_k=5")
    assert json.loads((tmp_path / "texts.json").read_text())["options"] == {"max_length": 12, "top_k": 5}
    run("generate.py", *options, "--stop_strings", " ", "--max_new_tokens", 40)
    assert len(json.loads((tmp_path / "texts.json").read_text())["texts"][0]) < 60


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}),
        (["--temperature", 0.7], {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}),
        (["--top_k", 5, "--do_sample", "null"], {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 5}),
        (["--min_p", 0.1], {"do_sample": True, "top_p": 0.95, "top_k": 0, "min_p": 0.1}),
        (["--do_sample", "False"], {"do_sample": False}),
        (["--temperature", 0, "--top_p", 0.5], {"do_sample": False}),
        (["--num_beams", 2], {"do_sample": False, "num_beams": 2}),
        (["--num_beams", 2, "--temperature", 2], {"do_sample": True, "num_beams": 2, "temperature": 2.0, "top_k": 0,
                                                  "top_p": 0.95}),
        (["--prompt_lookup_num_tokens", 2], {"do_sample": False, "prompt_lookup_num_tokens": 2}),
    ],
)  # fmt: skip
def test_sampling_is_the_default(model_folder, tmp_path, options, expected):
    """Unless the likeliest tokens, beams or the like are asked for; `generation_config.json` has no say."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.1, "top_k": 3, "eos_token_id": null}')
    given = ["--model_name_or_path", folder, "--prompt", "The quick", "--max_new_tokens", 30, "--eos_token_id", "null"]
    run("generate.py", *given, *options, "--output_file", tmp_path / "texts.json")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    set_seed(0)
    inputs = tokenizer("The quick", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=30, eos_token_id=None, **expected)
    assert json.loads((tmp_path / "texts.json").read_text())["texts"] == tokenizer.batch_decode(output)


def test_one_default_of_four_commands():
    """`generate` (above), `chat`, `serve` and `api`."""
    from tnn_scripts.chat import TEMPERATURE, TOP_P
    from tnn_scripts.serving.schema import CompletionBody

    expected = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
    assert CompletionBody(model="a", prompt="b").sampling() == expected == sampling(TEMPERATURE, TOP_P)


@pytest.mark.parametrize("missing", [(), ("pad_token",), ("pad_token", "eos_token")])
def test_generate_from_a_file_in_batches(missing, model_folder, tmp_path):
    """Greedy, so that one by one and batched are the same. Without a padding token the end of a text pads."""
    folder, config = tmp_path / "model", json.loads((model_folder / "tokenizer_config.json").read_text())
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in missing}))
    prompts, output = tmp_path / "prompts.txt", tmp_path / "result.json"
    prompts.write_text("The quick\n\nA dog jumps over\nThe\n")
    texts = []
    for size in (1, 3):
        ran = run("generate.py", "--model_name_or_path", folder, "--prompt_file", prompts, "--batch_size", size,
                  "--max_new_tokens", 8, "--do_sample", "false", "--output_file", output,
                  check=not (size > 1 and "eos_token" in missing))  # fmt: skip
        if ran.returncode:
            assert "must have a padding token or an end of text with --batch_size" in ran.stderr
            return
        texts.append(json.loads(output.read_text())["texts"])
    assert texts[0] == texts[1] and len(texts[0]) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "x", "--top_pp", "0.5"], "did you mean --top_p"),
        (["--prompt", "x", "--top_p"], "no value"),
        (["--prompt", "x", "--temperature", "hot"], "--temperature must be a number, or null, got hot"),
        (["--prompt", "x", "--temperature", "NaN"], "--temperature must be a number"),
        (["--prompt", "x", "--temperature=-1"], "--temperature must be at least 0, got -1"),
        (["--prompt", "x", "--top_p", "1.5"], "--top_p must be above 0 and at most 1, got 1.5"),
        (["--prompt", "x", "--top_k", "2.5"], "--top_k must be a whole number"),
        (["--prompt", "x", "--max_new_tokens", "0"], "--max_new_tokens must be at least 1, got 0"),
        (["--prompt", "x", "--num_beams", "true"], "--num_beams must be a whole number"),
        (["--prompt", "x", "--do_sample", "maybe"], "--do_sample must be true or false, or null, got maybe"),
        (["--prompt", "x", "--eos_token_id", '["a"]'], "--eos_token_id must have whole numbers"),
        (["--prompt", "x", "--prefill_chunk_size", "x"], "--prefill_chunk_size must be a whole number"),
        (["--prompt", "x", "--do_sample", "false", "--top_k", "5"], "--do_sample must be true with --top_k"),
        (["--prompt", "x", "--do_sample", "true", "--temperature", "0"], "--temperature must be above 0 with"),
        (["--prompt", "x", "--return_dict_in_generate", "true"], "must not be given: this program writes text"),
        ([], "--prompt, --prompt_file or a line"),
    ],
)
def test_generate_refuses(model_folder, arguments, message, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    result = run("generate.py", "--model_name_or_path", model_folder, *arguments, check=False)
    assert result.returncode == 2 and message in result.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_generate_from_the_standard_input(model_folder, kind, monkeypatch, tmp_path):
    """Each line is a prompt of its own, until an empty one; on a terminal, a mark says where to write."""
    monkeypatch.setattr("sys.stdin", kind("The quick\nA dog\n\nnot read\n"))
    options = ["--model_name_or_path", model_folder, "--max_new_tokens", 5, "--do_sample", "false"]
    written = run("generate.py", *options, "--output_file", tmp_path / "lines.json")
    run(
        "generate.py", *options, "--output_file", tmp_path / "given.json", "--prompt", "The quick", "--prompt", "A dog"
    )
    lines, given = (json.loads((tmp_path / name).read_text()) for name in ("lines.json", "given.json"))
    assert lines["texts"] == given["texts"] and lines["prompts"] == ["The quick", "A dog"]
    assert written.stdout.count("> ") == (3 if kind is Terminal else 0)


def test_nothing_is_written_on_a_terminal(model_folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert run("generate.py", "--model_name_or_path", model_folder).returncode == 0


@pytest.mark.parametrize("options", [["--order", 16], ["--tolerance", 1e-3]], ids=["order", "tolerance"])
def test_to_recurrent(model_folder, tmp_path, options):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 8)
    output = tmp_path / "converted"
    result = run("to_recurrent.py", "--model_name_or_path", model_folder, "--output_dir", output, "--dataset_name",
                 text,
                 "--rows", 2, *options)  # fmt: skip
    report = json.loads((output / "conversion.json").read_text())
    comparison = report["comparison"]
    assert abs(comparison["perplexity_change"]) < 1e-3 and comparison["top1_agreement"] > 0.99
    assert comparison["tokens"] == 2 * 8 * 32
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert "top-1 agreement" in result.stdout
    converted = AutoModelForCausalLM.from_pretrained(output)
    assert converted.config.tno_type == "modal"
    assert converted.generate(torch.tensor([[5, 6]]), max_new_tokens=3, eos_token_id=None).shape == (1, 5)


def test_to_recurrent_leaves_rtf_as_it_is(tmp_path):
    folder, text = save_model(tmp_path / "model", tno_type="rtf"), tmp_path / "text.txt"
    text.write_text(TEXT * 8)
    result = run(
        "to_recurrent.py", "--model_name_or_path", folder, "--output_dir", tmp_path / "out", "--dataset_name", text
    )
    assert "recurrence already" in result.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tno_type == "rtf"


SMALL = ["--hidden_size", 64, "--repeats", 1]
SHORT = ["--lengths", 16, 100, "--tokens", 200]


@pytest.mark.parametrize(
    "suite, options, ways, figures",
    [
        ("operators", ["--decay", 1], ["released", "rpe", "fd", "rtf"], ["milliseconds", "released_over_this"]),
        ("operators", ["--bidirectional"], ["rpe", "rpe eager", "ski"], ["milliseconds", "rpe_over_this"]),
        ("training", [], ["released", "fused", "hybrid", "gpt2", "llama", "mamba", "matmul"], ["matmul_over_this"]),
        ("training", ["--bidirectional"], ["rpe", "fd", "ski"], ["rpe_over_this"]),
        ("training", ["--blocks_only"], ["fused", "fused bf16", "matmul"], ["tokens_per_second"]),
        *exhaustive(("memory", ["--lengths", 100], ["released", "fused"], ["saved_mebibytes", "peak_mebibytes"])),
    ],
)
def test_benchmark_of_a_step(tmp_path, suite, options, ways, figures):
    output, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    lengths = (100,) if "--lengths" in options else (16, 100)
    result = run("benchmark.py", suite, *SMALL, *SHORT, *options, "--ways", *ways, "--output_file", output,
                 "--plot", picture)  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    assert [(row["length"], row["way"]) for row in rows] == [(length, way) for length in lengths for way in ways]
    assert all(row[figure] >= 0 for row in rows for figure in figures)
    if "released" in ways and suite != "memory":
        assert all(row["released_over_this"] == 1 for row in rows if row["way"] == "released")
    assert [cells[:2] for cells in table_rows(result.stdout)[2:]] == [[str(row["length"]), row["way"]] for row in rows]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_benchmark_of_streaming(tmp_path):
    output = tmp_path / "figures.json"
    run("benchmark.py", "streaming", *SMALL, "--lengths", 512, "--segment", 64, "--ways", "rtf",
        "--output_file", output)  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    assert [(row["way"], row["tokens"]) for row in rows] == [("rtf", 512)]
    assert all(row["microseconds_per_token"] > 0 for row in rows)


@pytest.mark.parametrize("causal", [True, False])
def test_released_form_of_the_benchmark_is_the_same_product(causal):
    from tnn_scripts.benchmarks.peers import released_product

    operator = build_tno(tiny_config(causal=causal)).double()
    v = torch.randn(2, 37, operator.channels, dtype=torch.float64)
    torch.testing.assert_close(released_product(operator, v), operator(v))


def test_benchmark_of_serving(tmp_path):
    output = tmp_path / "serving.json"
    sizes = ["--hidden_size", 64, "--num_hidden_layers", 2, "--vocab_size", 100, "--repeats", 1]
    run("benchmark.py", "serving", *sizes, "--requests", 4, "--alone", 1, "--new_tokens", 5, "--models", "rtf",
        "--output_file", output)  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    assert [row["arrivals"] for row in rows] == ["at once", "in turn"]
    assert all(0 < row["token_ms"] <= row["token_ms_p99"] and row["over_alone"] > 0 for row in rows)


def test_benchmark_of_generation(tmp_path):
    output = tmp_path / "generation.json"
    sizes = ["--hidden_size", 64, "--num_hidden_layers", 2, "--vocab_size", 100, "--repeats", 1]
    models = ["rpe", "fd", "rtf", "modal", "rpe-no-decay", "hybrid", "attention", "gpt2", "mamba"]
    result = run("benchmark.py", "generation", *sizes, "--contexts", 16, 300, "--output_file", output,
                 "--models", *models)  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    assert {row["model"] for row in rows} == set(models)
    assert all(row["ms_per_token"] > 0 and row["state_mebibytes"] > 0 for row in rows)
    states = {(row["model"], row["context"]): row["state_mebibytes"] for row in rows}
    assert states["gpt2", 300] > 2 * states["gpt2", 16]
    assert states["rtf", 300] == states["rtf", 16]
    grown = {model: states[model, 300] - states[model, 16] for model in models}
    assert grown["attention"] == pytest.approx(grown["gpt2"])
    assert grown["gpt2"] / 2 < grown["hybrid"] < grown["gpt2"] / 2 + grown["rpe"]  # one of its two layers is attention
    shown = [cells[:2] for cells in table_rows(result.stdout)[2:]]
    assert shown == [[row["model"], str(row["context"])] for row in rows]
