"""Copying and Delay: what their rows say, how they are scored, and the script at a size that takes seconds."""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.models import exhaustive
from helpers.scripts import table_rows
from modeling_tnn import TnnForCausalLM
from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.data.synthetic import BAND, IGNORED, Copying, Delay, Passkey, Recall
from tnn_scripts.options.synthetic import state_config
from tnn_scripts.run_synthetic import main
from tnn_scripts.runs import run_synthetic

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
    model = TnnForCausalLM(state_config(arguments(memory=5, num_tokens=8), 2))
    for shift, accuracy in ((0, 1.0), (1, None)):
        shifted = answers.roll(shift, dims=1)
        logits = 100.0 * torch.nn.functional.one_hot(shifted, 8)
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=8)
        score = run_synthetic.token_accuracy(shifted.numpy(), labels.numpy())["accuracy"]
        assert (loss < 1e-3) == (accuracy == 1.0) == (score == 1.0)


def test_delay_rows():
    row = Delay(5, seed=0, length=100, lag=30)[2]
    assert torch.equal(row["labels"][30:], row["signal"][:70]) and row["labels"][:30].abs().max() == 0
    spectrum = torch.fft.rfft(row["signal"]).abs()
    assert spectrum[int(BAND * 51) :].max() < 1e-4 and spectrum[: int(BAND * 51)].min() > 1e-3
    assert row["signal"].square().mean().item() == pytest.approx(1, rel=1e-5)


def test_recall_rows():
    """Each key is asked for once, somewhere behind the pairs, and the label behind it is its value."""
    rows, places = Recall(200, seed=3, pairs=4, length=20, num_tokens=13), set()
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        pairs = dict(zip(ids[:8:2], ids[1:8:2], strict=True))
        assert len(pairs) == 4 and max(pairs) < 6 <= min(pairs.values()) and max(pairs.values()) < 12
        asked = [place for place in range(8, 20) if ids[place] != 12]
        assert sorted(ids[place] for place in asked) == sorted(pairs)
        answers = {place: label for place, label in enumerate(labels) if label != IGNORED}
        assert answers == {place + 1: pairs[ids[place]] for place in asked}
        places |= set(asked)
    assert places == set(range(8, 19))


def test_passkey_rows():
    """The tokens behind the first marker are those to say at the end."""
    rows, starts = Passkey(200, seed=3, digits=3, length=16, num_tokens=9), set()
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        start, last = (place for place, token in enumerate(ids) if token == 8)
        assert last == 12 and ids[start : start + 4] == ids[12:] and min(ids[13:]) >= 4
        assert max(ids[:start] + ids[start + 4 : last], default=0) < 4
        assert labels == [IGNORED] * 13 + ids[13:]
        starts.add(start)
    assert starts == set(range(9))


def arguments(**fields):
    given = {"task": "copying"} | fields
    finds = given["task"] in ("recall", "passkey")
    models = {"variants": ["pure"], "memory": 4} if finds else {"state_sizes": [4]}
    return run_synthetic.SyntheticArguments(**models | given)


def test_states_of_another_operator():
    """The state sizes are those of the operator that is chosen."""
    args = arguments(config_overrides="tno_type=s4d", state_sizes=[4, 6])
    for states, config in args.models().items():
        (operator,) = {type(module) for module in TnnForCausalLM(config).modules() if hasattr(module, "num_modes")}
        assert operator.__name__ == "S4dOperator" and config.s4d_state_size == states
    with pytest.raises(ValueError, match="`s4d_state_size` must be an even number, got 5"):
        arguments(config_overrides="tno_type=s4d", state_sizes=[5])


HYBRID = "layer_types=[toeplitz,full_attention],num_attention_heads=1"


@pytest.mark.parametrize("fields", [{}, {"task": "recall", "num_tokens": 12, "length": 20}])
def test_other_blocks(fields):
    """Overrides reach all models, below those of a variant; fields that do not exist are refused."""
    args = arguments(config_overrides="toeplitz_mixer=s4,use_glu=False", **fields)
    (config,) = args.models().values()
    assert config.toeplitz_mixer == "s4" and not config.use_glu and config.gtu_expansion == 1
    if fields:
        args = arguments(config_overrides="toeplitz_mixer=s4", **fields | {"variants": ["pure:toeplitz_mixer=gtu"]})
        assert args.models()["pure"].toeplitz_mixer == "gtu"
    with pytest.raises(ValueError, match="toeplitz_mixr"):
        arguments(config_overrides="toeplitz_mixr=s4", **fields)


def test_enough_states_hold_a_delay():
    """The filter z^-lag is a solution as soon as the state holds the lag."""
    args = arguments(task="delay", memory=6, length=40, hidden_size=2, state_sizes=[6], rtf_initializer="zeros")
    model = run_synthetic.DelayModel(state_config(args, 6))
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
    main()
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert [(row["state_size"], row["seed"]) for row in results["rows"]] == [(2, 0), (2, 1), (8, 0), (8, 1)]
    assert all(np.isfinite(row[metric]) and row["steps"] == 3 for row in results["rows"])
    assert results["settings"]["memory"] == 4
    assert table_rows(capsys.readouterr().out)[0][:2] == ["state size", f"{metric}, mean"]


@pytest.mark.parametrize("task", ["recall", *exhaustive("passkey")])
def test_variants(task, monkeypatch, tmp_path, capsys):
    """Each variant is trained with its own fields and scored at each length; the longer score is of longer rows."""
    options = "--memory 2 --num_tokens 9 --length 12 --longer 24 --hidden_size 4 --num_hidden_layers 2 --max_steps 2"
    options += " --max_train_samples 20 --max_eval_samples 10 --save_strategy no --seeds 0 1"
    command = ["run_synthetic.py", "--task", task, "--variants", "pure", f"hybrid:{HYBRID}", *options.split()]
    monkeypatch.setattr(sys, "argv", [*command, "--output_dir", str(tmp_path)])
    seen = set()
    forward = TnnForCausalLM.forward

    @functools.wraps(forward)  # Trainer reads the names of the inputs
    def record(self, input_ids, **inputs):
        seen.add((self.training, self.config.layer_types[1], input_ids.shape[1]))
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(TnnForCausalLM, "forward", record)
    main()
    kinds = ("toeplitz", "full_attention")
    assert seen == {(training, kind, n) for kind in kinds for training, n in ((True, 12), (False, 12), (False, 24))}
    rows = json.loads((tmp_path / "all_results.json").read_text())["rows"]
    assert [(row["variant"], row["seed"]) for row in rows] == [("pure", 0), ("pure", 1), ("hybrid", 0), ("hybrid", 1)]
    assert all(set(row["by_length"]) == {"12", "24"} and row["accuracy"] == row["by_length"]["12"] for row in rows)
    assert table_rows(capsys.readouterr().out)[0] == [
        "variant", "accuracy, mean", "lowest", "highest", "at 24", "seeds",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_synthetic.py", "--recipe", str(recipe)])
    args, _ = parse_arguments([run_synthetic.SyntheticArguments, training_options()], "")
    assert args.task in recipe.stem and args.models()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"memory": 10, "state_sizes": [21]}, "--state_sizes must be .* below the length 21, got 21"),
        ({"state_sizes": [0]}, "--state_sizes must be at least 1 .*, got 0"),
        ({"task": "delay", "memory": 50, "length": 50}, "--memory must be below --length 50 for a delay, got 50"),
        ({"task": "recall", "num_tokens": 8}, "--num_tokens must be at least 2 --memory . 1 for recall, got 8"),
        ({"task": "recall", "length": 12}, "--length and --longer must be at least 13 for recall, got 12"),
        ({"task": "passkey", "longer": [9]}, "--length and --longer must be at least 10 for passkey, got 4000 9"),
        ({"task": "passkey", "num_tokens": 2}, "--num_tokens must be at least 3, got 2"),
        ({"task": "recall", "state_sizes": [4]}, "--state_sizes must be left out for recall, got 4"),
        ({"task": "recall", "variants": []}, "--variants must be given for recall, got nothing"),
        ({"state_sizes": []}, "--state_sizes must be given for copying, got nothing"),
        ({"longer": [9]}, "--longer must be left out for copying, got 9"),
        ({"task": "recall", "variants": ["a", "a"]}, "--variants must have different names, got a, a"),
        ({"task": "recall", "variants": ["a:tno_type=x"]}, "--variants a: `tno_type` must be"),
    ],
)
def test_refused_arguments(fields, message):
    with pytest.raises(ValueError, match=message):
        arguments(**fields)
