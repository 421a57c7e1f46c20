"""--seed of every training script: the same one gives the same result, another one another."""

import json
import sys

import pytest
from transformers import TrainingArguments

from helpers.models import exhaustive
from helpers.scripts import run_script, weights, write_config, write_text
from helpers.small_runs import (
    ablation_options,
    demo_options,
    image_options,
    listops_options,
    small_pretrain_options,
    synthetic_options,
)
from tnn_scripts.common.arguments import chosen_seeds, parse_arguments, training_options
from tnn_scripts.options.ablation import AblationArguments
from tnn_scripts.runs import demo


@pytest.mark.parametrize(
    "script, options",
    [
        ("pretrain", small_pretrain_options),
        ("run_image_classification", image_options),
        *exhaustive(("demo", demo_options), ("run_lra", listops_options)),
    ],
)
def test_weights(script, options, tmp_path):
    given = options(tmp_path)
    trained = []
    for run, seed in enumerate((3, 3, 4)):
        run_script(script, *given, "--output_dir", tmp_path / f"out-{run}", "--seed", seed)
        trained.append(weights(tmp_path / f"out-{run}"))
    first, again, other = trained
    assert all(first[name].equal(again[name]) for name in first)
    assert any(not first[name].equal(other[name]) for name in first)


def test_order_of_the_data(tmp_path):
    """The first batch of the Trainer, whose sampler has the seed; pretrain.py has a test of its own stream."""
    preset, text = write_config(tmp_path / "preset"), write_text(tmp_path / "text.txt", copies=60)
    batches = []
    for seed in (3, 3, 4):
        args = demo.DemoArguments(str(preset), dataset_name=str(text), output_dir=str(tmp_path / "out"), seed=seed)
        batches.append(
            next(iter(demo.build_trainer(args, demo.load_config(args.config_name, {})).get_train_dataloader()))[
                "input_ids"
            ]
        )
    assert batches[0].equal(batches[1]) and not batches[0].equal(batches[2])


@pytest.mark.parametrize(
    "script, options, figure",
    [("run_ablation", ablation_options, "perplexity"), ("run_synthetic", synthetic_options, "error")],
)
def test_figures(script, options, figure, tmp_path):
    """One model for --seed; several for --seeds, the same ones."""
    given, rows = options(tmp_path), []
    for run, seeds in enumerate((["--seed", 3], ["--seed", 3], ["--seed", 4], ["--seeds", 3, 4])):
        run_script(script, *given, *seeds, "--output_dir", tmp_path / f"out-{run}")
        rows.append(json.loads((tmp_path / f"out-{run}" / "all_results.json").read_text())["rows"])
    (first,), (again,), (other,), both = rows
    assert first["seed"] == 3 and first[figure] == again[figure] != other[figure]
    assert [row["seed"] for row in both] == [3, 4] and [row[figure] for row in both] == [first[figure], other[figure]]


def test_one_of_both(tmp_path):
    training = TrainingArguments(str(tmp_path), seed=7)
    assert chosen_seeds(None, training) == [7] and chosen_seeds([7], training) == [7]
    assert chosen_seeds([0, 1], TrainingArguments(str(tmp_path))) == [0, 1]
    with pytest.raises(ValueError, match="--seed must not be given together with --seeds 0 1, got 7"):
        chosen_seeds([0, 1], training)


@pytest.mark.parametrize(
    "recipe, given, seeds",
    [("seed: 7", [], [7]), ("seed: 7", ["--seeds", "0", "1"], [0, 1]), ("seeds: [0, 1]", ["--seed=7"], [7])],
)
def test_a_recipe_gives_way(recipe, given, seeds, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{recipe}\nvariants: [rpe]\n")
    monkeypatch.setattr(sys, "argv", ["tnn", "--recipe", str(file), "--output_dir", str(tmp_path), *given])
    args, training = parse_arguments([AblationArguments, training_options()], "")
    assert chosen_seeds(args.seeds, training) == seeds
