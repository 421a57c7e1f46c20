"""The ablation script: its recipes, one small run, and that every length scores the same tokens."""

import json
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from helpers.models import seeded, tiny_config
from helpers.scripts import run_script, table_rows
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.scoring import evaluate
from tnn_scripts.run_ablation import main
from tnn_scripts.runs import run_ablation

ROOT = Path(__file__).parents[2]

RECIPES = sorted((ROOT / "configuration" / "recipes" / "ablations").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_ablation.py", "--recipe", str(recipe)])
    args, _ = parse_arguments([run_ablation.AblationArguments, training_options()], "")
    configs = [args.variant_config(variant).to_dict() for variant in args.variants]
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == len(args.variants)


def test_script(monkeypatch, tmp_path, capsys):
    text, small = tmp_path / "text.txt", "hidden_size=16,num_hidden_layers=1,max_position_embeddings=16,vocab_size=300"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 300)
    options = ["--config_overrides", small, "--max_steps", "2", "--save_strategy", "no", "--longer", "70"]
    options += ["--eval_tokens", "100", "--logging_steps", "1"]
    variants = ["rpe", "explicit:tno_type=explicit", "masked:causal=false"]
    command = ["run_ablation.py", "--dataset_name", text, "--output_dir", tmp_path / "out", *options, "--variants"]
    monkeypatch.setattr(sys, "argv", list(map(str, [*command, *variants])))
    main()
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert [row["variant"] for row in results["rows"]] == ["rpe", "explicit", "masked"]
    assert all(list(row["perplexity"]) == ["16", "70"] and row["steps"] == 2 for row in results["rows"])
    assert [row["scored_tokens"] for row in results["rows"]][:2] == [99, 99]
    losses = [row["training_loss"] for row in results["rows"]]
    assert all(list(loss) == ["1", "2"] and 4 < loss["1"] < 20 for loss in losses)
    assert table_rows(capsys.readouterr().out)[0][:3] == ["variant", "perplexity at 16", "perplexity at 70"]


def test_every_length_scores_the_same_tokens():
    """Predicted ones: all but the first. Masked ones: the same masks at each length, of rows that are not padded."""
    tokenizer = run_ablation.tokenizer_for(Dataset.from_dict({"text": ["The quick brown fox."]}), 300)
    ids = torch.randint(260, (100,), generator=torch.Generator().manual_seed(0))
    causal, masked = (
        seeded(model, tiny_config(causal=model is TnnForCausalLM, vocab_size=300)).eval()
        for model in (TnnForCausalLM, TnnForMaskedLM)
    )
    for length in (16, 33, 64, 99, 100):
        loss, count = run_ablation.score(causal, ids, tokenizer, length, 40)
        expected = evaluate(causal, ids, length, None, 1000)
        assert count == expected["tokens"] == 99 and loss == pytest.approx(expected["loss"], rel=1e-6)
        found = [run_ablation.score(masked, ids, tokenizer, length, rows * length) for rows in (1, 3)]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert found[0][1] == (run_ablation.mask(ids, tokenizer)[1] != -100).sum() and 5 < found[0][1] < 30
    (hidden, labels), losses = run_ablation.mask(ids, tokenizer), []
    for start in range(0, 100, 33):
        row = slice(start, start + 33)
        logits = masked(hidden[None, row]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[row], reduction="sum").item())
    loss, count = run_ablation.score(masked, ids, tokenizer, 33, 99)
    assert sum(losses) / count == pytest.approx(loss, rel=1e-5)


PROGRAMS = [["run_ablation", "--variants", "rpe"], ["run_synthetic", "--task", "copying", "--state_sizes", "8"]]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "given, message",
    [
        (["--resume_from_checkpoint", "latest"], "--resume_from_checkpoint must not be given for this program: it"),
        (["--push_to_hub"], "--push_to_hub must not be given for this program: publish"),
    ],
)
def test_no_checkpoints_and_no_publishing(program, given, message, tmp_path, capsys):
    """These programs train several models, and keep none."""
    with pytest.raises(SystemExit) as error:
        run_script(*program, "--output_dir", tmp_path / "out", *given)
    assert message in str(error.value.code) + capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variants, message",
    [
        (["a:width=3"], "--variants a: changes must be fields of TnnConfig, got width"),
        (["a:decay=2"], r"--variants a: `decay` must be in \(0, 1\] or None, got 2"),
        (["decay=1"], "--variants must be NAME or NAME:FIELD=VALUE,..., got decay=1"),
        (["a", "a:decay=1"], "--variants must have different names, got a, a"),
    ],
)
def test_refused_variants(variants, message):
    with pytest.raises(ValueError, match=message):
        run_ablation.AblationArguments(variants=variants)
