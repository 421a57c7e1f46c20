"""Copying and Delay: what their rows say, how they are scored, and the script at a size that takes seconds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.models import exhaustive
from helpers.scripts import table_rows
from modeling_tnn import TnnForCausalLM
from tnn_scripts import run_synthetic
from tnn_scripts.data.synthetic import BAND, Copying, Delay

ROOT = Path(__file__).parents[2]

RECIPES = sorted((ROOT / "configuration" / "recipes" / "synthetic").glob("*.yaml"))


def test_copying_rows():
    rows = Copying(50, seed=3, memory=4, num_tokens=6)
    row = rows[7]
    assert len(rows) == 50 and row["input_ids"].tolist()[4:] == [5] * 5
    assert row["labels"].tolist()[:5] == [-100] * 5 and torch.equal(row["labels"][5:], row["input_ids"][:4])
    assert torch.equal(Copying(50, 3, 4, 6)[7]["input_ids"], row["input_ids"])
    assert not torch.equal(Copying(50, 4, 4, 6)[7]["input_ids"], row["input_ids"])
    assert {token for row in rows for token in row["input_ids"].tolist()} == set(range(6))


def test_copying_is_scored_where_the_loss_is():
    """A model that answers each marker right has no loss and accuracy 1; one answer too late has neither."""
    rows = [Copying(3, 0, 5, 8)[index] for index in range(3)]
    labels = torch.stack([row["labels"] for row in rows])
    answers = torch.zeros_like(labels)
    answers[:, 5:10] = labels[:, 6:]
    model = TnnForCausalLM(run_synthetic.model_config(arguments(memory=5, num_tokens=8), 2))
    for shift, accuracy in ((0, 1.0), (1, None)):
        shifted = answers.roll(shift, dims=1)
        logits = 100.0 * torch.nn.functional.one_hot(shifted, 8)
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=8)
        score = run_synthetic.copying_accuracy(shifted.numpy(), labels.numpy())["accuracy"]
        assert (loss < 1e-3) == (accuracy == 1.0) == (score == 1.0)


def test_delay_rows():
    row = Delay(5, seed=0, length=100, lag=30)[2]
    assert torch.equal(row["labels"][30:], row["signal"][:70]) and row["labels"][:30].abs().max() == 0
    spectrum = torch.fft.rfft(row["signal"]).abs()
    assert spectrum[int(BAND * 51) :].max() < 1e-4 and spectrum[: int(BAND * 51)].min() > 1e-3
    assert row["signal"].square().mean().item() == pytest.approx(1, rel=1e-5)


def arguments(**fields):
    return run_synthetic.SyntheticArguments(**{"task": "copying", "state_sizes": [4]} | fields)


def test_enough_states_hold_a_delay():
    """The filter z^-lag is a solution as soon as the state holds the lag."""
    args = arguments(task="delay", memory=6, length=40, hidden_size=2, state_sizes=[6], rtf_initializer="zeros")
    model = run_synthetic.DelayModel(run_synthetic.model_config(args, 6))
    with torch.no_grad():
        model.encoder.weight.fill_(1), model.encoder.bias.zero_()
        model.decoder.weight.fill_(0.5), model.decoder.bias.zero_()
        model.tno.direct.zero_(), model.tno.numerator[:, 5].fill_(1)
    row = {name: values[None] for name, values in Delay(1, 0, 40, 6)[0].items()}
    outputs = model(**row)
    assert outputs["loss"] < 1e-10
    assert run_synthetic.delay_error(outputs["logits"].detach().numpy(), row["labels"].numpy())["error"] < 1e-5
    half = run_synthetic.delay_error(0.5 * row["labels"].numpy(), row["labels"].numpy())
    assert half["error"] == pytest.approx(0.5)


@pytest.mark.parametrize("task, metric", [("copying", "accuracy"), *exhaustive(("delay", "error"))])
def test_script(task, metric, monkeypatch, tmp_path, capsys):
    options = "--state_sizes 2 8 --seeds 0 1 --memory 4 --num_tokens 5 --length 30 --hidden_size 4 --train_rows 40"
    options += " --num_hidden_layers 1 --eval_rows 10 --max_steps 3 --learning_rate 0.01 --save_strategy no"
    command = ["run_synthetic.py", "--task", task, *options.split(), "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    run_synthetic.main()
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert [(row["state_size"], row["seed"]) for row in results["rows"]] == [(2, 0), (2, 1), (8, 0), (8, 1)]
    assert all(np.isfinite(row[metric]) and row["steps"] == 3 for row in results["rows"])
    assert results["settings"]["memory"] == 4
    assert table_rows(capsys.readouterr().out)[0][:2] == ["state size", f"{metric}, mean"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_synthetic.py", "--recipe", str(recipe)])
    args, _ = run_synthetic.parse_arguments([run_synthetic.SyntheticArguments, run_synthetic.TrainingArguments], "")
    assert args.task in recipe.stem
    for size in args.state_sizes:
        run_synthetic.model_config(args, size)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"memory": 10, "state_sizes": [21]}, "--state_sizes must be .* below the length 21, got 21"),
        ({"state_sizes": [0]}, "--state_sizes must be at least 1 .*, got 0"),
        ({"task": "delay", "memory": 50, "length": 50}, "--memory must be below --length 50 for a delay, got 50"),
    ],
)
def test_refused_arguments(fields, message):
    with pytest.raises(ValueError, match=message):
        arguments(**fields)
