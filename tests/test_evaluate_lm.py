"""Perplexity by length: the numbers of a direct computation, whatever the number of tokens in a pass."""

import json
import math

import pytest
import torch
from conftest import lively_language_model
from datasets import Dataset
from training_scripts import SENTENCES, run_script, write_text
from transformers import GPT2Config, GPT2LMHeadModel

import evaluate_lm  # isort: skip - on the path once training_scripts is imported
from corpus import train_tokenizer  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, a TNN and a GPT-2, none of them trained."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    torch.manual_seed(0)
    peer = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=300))
    models = {"tnn": lively_language_model(vocab_size=300).float(), "gpt2": peer}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "tnn" / "training_args.json").write_text('{"block_size": 24}')
    write_text(folder / "text.txt", copies=20)
    return folder


def direct(model, ids: torch.Tensor, length: int, stride: int | None) -> tuple[float, int]:
    """The definition, one prediction after the other."""
    nats, end = [], 0
    for start in range(0, len(ids) - length + 1, stride or length):
        row = ids[start : start + length]
        log_probabilities = model(row[None]).logits[0].log_softmax(-1)
        first = 1 if stride is None or start == 0 else end - start
        nats += [-log_probabilities[i - 1, row[i]].item() for i in range(first, length)]
        end = start + length
    return sum(nats) / len(nats), len(nats)


@pytest.mark.parametrize("tokens_per_pass", [1000, 64, 10])
@pytest.mark.parametrize("stride", [None, 7])
@pytest.mark.parametrize("name", ["tnn", "gpt2"])
def test_definition(name, stride, tokens_per_pass, folder):
    model = evaluate_lm.AutoModelForCausalLM.from_pretrained(folder / name).eval()
    ids = torch.randint(300, (100,), generator=torch.Generator().manual_seed(0))
    for length in (2, 24, 33) if stride is None else (24, 33):
        result = evaluate_lm.evaluate(model, ids, length, stride, tokens_per_pass)
        loss, count = direct(model, ids, length, stride)
        assert result["tokens"] == count and result["loss"] == pytest.approx(loss, rel=1e-5)


def test_report(folder, tmp_path, capsys):
    options = ["--file", folder / "text.txt", "--lengths", 16, 64, 128, 100000, "--stride", 12, "--max_tokens", 400]
    run_script("evaluate_lm", "--model", folder / "tnn", folder / "gpt2", *options, "--output_dir", tmp_path)
    results = json.loads((tmp_path / "perplexity.json").read_text())["results"]
    assert [(r["length"], r["stride"]) for r in results if r["model"].endswith("tnn")] == [
        (16, None), (16, 12), (64, None), (64, 12), (128, None), (128, 12)
    ]  # fmt: skip
    assert {r["length"] for r in results if r["model"].endswith("gpt2")} == {16, 64}
    captured = capsys.readouterr()
    assert "length 100000 is left out, the text has 400 tokens" in captured.err
    assert "length 128 is left out, the model takes 64" in captured.err
    assert {(r["model"].endswith("tnn"), r["trained_length"]) for r in results} == {(True, 24), (False, 64)}
    lines = [line + "\n" for line in (folder / "text.txt").read_text().splitlines()]
    tokenizer = evaluate_lm.AutoTokenizer.from_pretrained(folder / "tnn")
    bytes_per_token = len("".join(lines).encode()) / sum(map(len, tokenizer(lines)["input_ids"]))
    for result in results:
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        bits = math.log2(result["perplexity"]) / bytes_per_token
        assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "perplexity.md").read_text() in captured.out
    assert "| length | tnn | tnn, stride 12 | gpt2 | gpt2, stride 12 |" in captured.out


@pytest.mark.parametrize(
    "given, message",
    [
        (["--file", "nowhere.txt"], "nowhere.txt: there is no such file"),
        ([], "give either --file or --dataset_name"),
        (["--file", "TEXT", "--lengths", 1], "--lengths must be at least 2"),
        (["--file", "TEXT", "--stride", 99, "--lengths", 64], "--stride 99 must be"),
        (["--file", "TEXT", "--lengths", 99999], "fewer than any of the lengths"),
        (["--file", "TEXT", "--text_column", "body"], "one of them must be 'body'"),
    ],
)
def test_refused(given, message, folder, tmp_path, capsys):
    given = [folder / "text.txt" if value == "TEXT" else value for value in given]
    with pytest.raises(SystemExit) as error:
        run_script("evaluate_lm", "--model", folder / "tnn", "--output_dir", tmp_path, *given)
    assert message in str(error.value.code) + capsys.readouterr().err
