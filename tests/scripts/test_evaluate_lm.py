"""Perplexity by length equals a direct computation, for any number of tokens in a pass."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.models import exhaustive, lively_language_model
from helpers.scripts import SENTENCES, run_script, table_rows, write_text
from tnn_scripts import evaluate_lm
from tnn_scripts.data.text import tokenize, train_tokenizer
from tnn_scripts.data.token_bytes import bytes_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, a TNN and a GPT-2, all untrained."""
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


@functools.cache
def load(folder: Path):
    return evaluate_lm.AutoModelForCausalLM.from_pretrained(folder).eval()


def text_of(tokens: int) -> torch.Tensor:
    return torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(0))


@functools.cache
def direct(model, tokens: int, length: int, stride: int | None) -> tuple[float, int]:
    """The definition, one prediction after the other: every token but the first, once, in the first row it is in."""
    stride, nats, ids = stride or length - 1, [], text_of(tokens)
    for i in range(1, len(ids)):
        start = max(0, math.ceil((i + 1 - length) / stride)) * stride
        nats.append(-model(ids[None, start:i]).logits[0, -1].log_softmax(-1)[ids[i]].item())
    return sum(nats) / len(nats), len(nats)


@pytest.mark.parametrize("tokens_per_pass", [1000, 10, *exhaustive(64)])
@pytest.mark.parametrize("stride", [None, 7])
@pytest.mark.parametrize("name", ["tnn", "gpt2"])
def test_definition(name, stride, tokens_per_pass, folder):
    """All lengths score the same tokens, for any length of the last row."""
    model = load(folder / name)
    for tokens in (100, 33, 34, 64, 97):
        ids = text_of(tokens)
        for length in (2, 11, 24, 33) if stride is None else (11, 24, 33):
            result = evaluate_lm.evaluate(model, ids, length, stride, tokens_per_pass)
            loss, count = direct(model, tokens, length, stride)
            assert result["tokens"] == count == tokens - 1 and result["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_model_without_context_has_one_loss(folder):
    """The loss of a model without context must not depend on the length."""

    class Unigram(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, ids, **options):
            logits = torch.linspace(0, 5, 300).expand(*ids.shape, 300)
            return CausalLMOutputWithPast(logits=logits)

    ids = torch.randint(300, (1000,), generator=torch.Generator().manual_seed(0)).sort().values
    losses = {evaluate_lm.evaluate(Unigram(), ids, length, None, 128)["loss"] for length in (2, 3, 130, 600, 999)}
    assert max(losses) - min(losses) < 1e-6


TEXT = ["Ein schöner Tag – 日本語 🙂", "", "plain text", "  two  spaces é", "the end"]


def byte_level(merges: bool):
    return train_tokenizer(Dataset.from_dict({"text": TEXT * 3 if merges else ["a"]}), 300)


def words():
    """Words without what is between them, of letters without accents: the text cannot be got back from it."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "eager": 1, "text": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize("merges", [True, False])
def test_bytes_of_byte_level_tokens(merges):
    """Each of their letters is a byte; a count within a character has all of it."""
    tokenizer = byte_level(merges)
    tokens = tokenize(TEXT, tokenizer)
    sizes = [len(token) for ids in tokens for token in tokenizer.convert_ids_to_tokens(ids)]
    text = "".join(f"{line}\n" for line in TEXT)
    ends = {len(text[:end].encode()) for end in range(len(text) + 1)}
    for count in range(len(sizes) + 1):
        exact = sum(sizes[:count])
        assert bytes_until(TEXT, tokens, tokenizer, count) == min(end for end in ends if end >= exact)


def test_bytes_of_words():
    """Characters between two words count for the second word, and those at the end of a line for the line."""
    tokenizer = words()
    tokens = tokenize(TEXT, tokenizer)
    assert [len(ids) for ids in tokens] == [8, 0, 2, 3, 2]
    counts = [bytes_until(TEXT, tokens, tokenizer, count) for count in range(16)]
    parts = ["Ein", " schöner", " Tag", " –", " 日", "本", "語", " 🙂\n"]
    parts += ["\nplain", " text\n", "  two", "  spaces", " é\n", "the", " end\n"]
    assert counts == [len("".join(parts[:count]).encode()) for count in range(16)]


def test_bytes_of_a_tokenizer_without_offsets():
    """In proportion within a line, exact at its ends."""

    class Slow:
        is_fast = False

    tokens = [[1, 2], [], [3, 4, 5, 6], [7], [8]]
    lines = [len(f"{line}\n".encode()) for line in TEXT]
    counts = [bytes_until(TEXT, tokens, Slow(), count) for count in range(9)]
    assert counts[0] == 0 and counts[2] == lines[0] and counts[6] == sum(lines[:3])
    assert counts[4] == sum(lines[:2]) + round(lines[2] / 2) and counts[8] == sum(lines)


def test_report(folder, tmp_path, capsys):
    options = [
        "--validation_file",
        folder / "text.txt",
        "--lengths",
        16,
        64,
        128,
        100000,
        "--stride",
        12,
        "--max_tokens",
        400,
    ]
    run_script(
        "evaluate_lm", "--model_name_or_path", folder / "tnn", folder / "gpt2", *options, "--output_dir", tmp_path
    )
    results = json.loads((tmp_path / "all_results.json").read_text())["results"]
    assert [(r["length"], r["stride"]) for r in results if r["model"].endswith("tnn")] == [
        (16, None), (16, 12), (64, None), (64, 12), (128, None), (128, 12)
    ]  # fmt: skip
    assert {r["length"] for r in results if r["model"].endswith("gpt2")} == {16, 64}
    captured = capsys.readouterr()
    assert "length 100000 is left out, because the text has 400 tokens" in captured.err
    assert "length 128 is left out, because the model takes at most 64" in captured.err
    assert {(r["model"].endswith("tnn"), r["trained_length"]) for r in results} == {(True, 24), (False, 64)}
    tokenizer = evaluate_lm.AutoTokenizer.from_pretrained(folder / "tnn")
    ids = [i for line in (folder / "text.txt").read_text().splitlines() for i in tokenizer(line + "\n")["input_ids"]]
    scored = len("".join(tokenizer.convert_ids_to_tokens(ids[1:400])))  # a letter is a byte
    for result in results:
        assert result["tokens"] == 399 and result["bytes"] == scored
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert result["bits_per_byte"] == pytest.approx(math.log2(result["perplexity"]) * 399 / scored, rel=1e-6)
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "perplexity.md").read_text() in captured.out
    assert table_rows(captured.out)[0] == ["length", "tnn", "tnn, stride 12", "gpt2", "gpt2, stride 12"]


@pytest.mark.parametrize(
    "given, message",
    [
        (["--validation_file", "nowhere.txt"], "nowhere.txt does not exist"),
        ([], "either --validation_file or --dataset_name must be given"),
        (["--validation_file", "TEXT", "--lengths", 1], "--lengths must be at least 2"),
        (
            ["--validation_file", "TEXT", "--stride", 99, "--lengths", 64],
            "--stride must be at least 1 and below the smallest of --lengths, got 99",
        ),
        (["--validation_file", "TEXT", "--lengths", 99999], "--lengths must have one that fits"),
        (["--validation_file", "TEXT", "--text_column", "body"], "--text_column must be a column of"),
    ],
)
def test_refused(given, message, folder, tmp_path, capsys):
    given = [folder / "text.txt" if value == "TEXT" else value for value in given]
    with pytest.raises(SystemExit) as error:
        run_script("evaluate_lm", "--model_name_or_path", folder / "tnn", "--output_dir", tmp_path, *given)
    assert message in str(error.value.code) + capsys.readouterr().err
