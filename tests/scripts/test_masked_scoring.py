"""Perplexity of hidden tokens by length equals a direct computation, for any number of tokens in a pass."""

import json
import math

import pytest
import torch
from datasets import Dataset
from transformers.modeling_outputs import MaskedLMOutput

from helpers.models import seeded, tiny_config
from helpers.scripts import SENTENCES, run_script, table_rows, write_text
from modeling_tnn import TnnForMaskedLM
from tnn_scripts.common.masked_scoring import hidden_tokens, score_masked
from tnn_scripts.data.text import train_tokenizer

ENCLOSING, MASK = ([0], [2]), 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of SKI with a tokenizer that has a mask token, and a text."""
    folder = tmp_path_factory.mktemp("masked")
    model = seeded(TnnForMaskedLM, tiny_config(causal=False, tno_type="ski", vocab_size=300, ski_grid_length=24))
    model.save_pretrained(folder / "ski")
    train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked=True).save_pretrained(folder / "ski")
    write_text(folder / "text.txt", copies=20)
    return folder


def text_of(tokens: int) -> torch.Tensor:
    return torch.randint(5, 300, (tokens,), generator=torch.Generator().manual_seed(0))


def direct(model, ids: torch.Tensor, hidden: torch.Tensor, length: int) -> list[float]:
    """The definition: each hidden token alone, in its row with all hidden tokens of the row masked."""
    losses, size = [], length - 2
    for i in hidden.nonzero()[:, 0].tolist():
        start = i // size * size
        row = [MASK if hide else token for token, hide in zip(ids.tolist(), hidden.tolist(), strict=True)]
        logits = model(torch.tensor([[0, *row[start : start + size], 2]])).logits[0, 1 + i - start]
        losses.append(-logits.log_softmax(-1)[ids[i]].item())
    return losses


@pytest.mark.parametrize("tokens_per_pass", [1000, 10])
@pytest.mark.parametrize("tno_type", ["rpe", "ski"])
def test_definition(tno_type, tokens_per_pass):
    model = seeded(TnnForMaskedLM, tiny_config(causal=False, tno_type=tno_type, vocab_size=300)).eval()
    ids, hidden = text_of(61), hidden_tokens(61, 0.3, seed=1)
    for length in (3, 11, 33, 61, 63):
        nats = score_masked(model, ids, hidden, length, MASK, ENCLOSING, tokens_per_pass)
        assert nats.tolist() == pytest.approx(direct(model, ids, hidden, length), rel=1e-4)


def test_a_model_without_context_has_one_loss():
    class Unigram(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, ids):
            return MaskedLMOutput(logits=torch.linspace(0, 5, 300).expand(*ids.shape, 300))

    ids, hidden = text_of(997).sort().values, hidden_tokens(997, 0.15, seed=0)
    scores = [score_masked(Unigram(), ids, hidden, length, MASK, ENCLOSING, 128) for length in (3, 17, 130, 999)]
    assert all(torch.equal(score, scores[0]) for score in scores) and len(scores[0]) == hidden.sum()


def test_hidden_tokens():
    """As many as asked for, the same ones for a seed, and those of a shorter text among them."""
    hidden = hidden_tokens(10_000, 0.15, seed=0)
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(hidden, hidden_tokens(10_000, 0.15, seed=0))
    assert not torch.equal(hidden, hidden_tokens(10_000, 0.15, seed=1))


def test_report(folder, tmp_path, capsys):
    """Fields change at load: a grid that is stretched is another model on longer texts."""
    options = ["--objective", "mlm", "--model_name_or_path", folder / "ski", "--validation_file", folder / "text.txt"]
    options += ["--lengths", 16, 64, 100000, "--max_tokens", 400, "--mlm_probability", 0.2, "--seed", 3]
    reports = []
    for overrides in ([], ["--config_overrides", "ski_grid_length=64"]):
        run_script("evaluate_lm", *options, *overrides, "--output_dir", tmp_path / str(len(reports)))
        reports.append(json.loads((tmp_path / str(len(reports)) / "all_results.json").read_text())["results"])
    first, second = reports
    hidden = int(hidden_tokens(400, 0.2, seed=3).sum())
    for result in first + second:
        assert result["tokens"] == hidden and result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert [result["length"] for result in first] == [16, 64]
    assert abs(first[1]["loss"] - second[1]["loss"]) > 1e-6
    captured = capsys.readouterr()
    assert "length 100000 is left out, because the text has 400 tokens" in captured.err
    assert table_rows(captured.out)[0] == ["length", "ski"] and "perplexity of hidden tokens" in captured.out
    assert (tmp_path / "0" / "perplexity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stride", 8], "--stride must not be given with --objective mlm"),
        (["--mlm_probability", 1.0], "--mlm_probability must be in (0, 1), got 1.0"),
        (["--lengths", 2], "--lengths must be at least 3 with --objective mlm, got 2"),
        (["--mlm_probability", 1e-9, "--max_tokens", 50], "--mlm_probability must hide a token of the text"),
        (["--config_overrides", "grid=3"], "--config_overrides must be fields of TnnConfig, got grid"),
    ],
)
def test_refused(options, message, folder, tmp_path, capsys):
    given = ["--objective", "mlm", "--model_name_or_path", folder / "ski", "--validation_file", folder / "text.txt"]
    with pytest.raises(SystemExit) as error:
        run_script("evaluate_lm", *given, "--lengths", 16, "--output_dir", tmp_path, *options)
    assert message in str(error.value.code) + capsys.readouterr().err


def test_a_tokenizer_without_a_mask(folder, tmp_path, capsys):
    seeded(TnnForMaskedLM, tiny_config(causal=False, vocab_size=300)).save_pretrained(tmp_path / "model")
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    tokenizer.save_pretrained(tmp_path / "model")
    options = ["--objective", "mlm", "--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "out"]
    with pytest.raises(SystemExit):
        run_script("evaluate_lm", *options, "--validation_file", folder / "text.txt", "--lengths", 16)
    message = capsys.readouterr().err
    assert "The tokenizer must have a mask token" in message and message.endswith("model\n")
