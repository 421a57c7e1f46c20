"""The programs that use Trainer, in two processes: they do what one does, and the first alone writes."""

import json

import pytest

from helpers.glue import glue_options
from helpers.scripts import ROOT, assert_same_weights, run_ranks, run_script, table_rows

pytestmark = pytest.mark.slow

SMALL = ["--max_steps", 3, "--save_strategy", "no", "--report_to", "none", "--use_cpu", "--learning_rate", 0.01]
MODEL = "hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4,hidden_dropout_prob=0"
TEXT = ["--eval_tokens", 100, "--config_overrides", f"{MODEL},max_position_embeddings=16,vocab_size=300"]
DELAY = ["--task", "delay", "--memory", 4, "--length", 30, "--max_train_samples", 40, "--max_eval_samples", 10]
LISTOPS = ["--task", "listops", "--config_name", "tnn-listops", "--max_train_samples", 50]
PROGRAMS = {
    "run_ablation": ["--dataset_name", ROOT / "LICENSE", "--variants", "rpe", *TEXT],
    "run_synthetic": [*DELAY, "--hidden_size", 4, "--num_hidden_layers", 1, "--state_sizes", 2],
    # A batch norm would have the statistics of each process alone.
    "run_lra": [*LISTOPS, "--config_overrides", f"{MODEL},classifier_dropout=0,norm_type=layernorm"],
}


def results(folder) -> dict:
    return json.loads((folder / "all_results.json").read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_are_one(program, tmp_path, capsys):
    """The same rows in each step, so the same scores; one table and one file of results."""
    options = [*PROGRAMS[program], *SMALL]
    run_script(program, *options, "--per_device_train_batch_size", 4, "--output_dir", tmp_path / "one")
    printed = capsys.readouterr().out
    two = ["--per_device_train_batch_size", 2, "--output_dir", tmp_path / "two"]
    (first, _), (second, _) = run_ranks(program, *options, *two)
    assert not second.strip() and [row[0] for row in table_rows(first)] == [row[0] for row in table_rows(printed)]
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    if program == "run_lra":
        assert two["test_accuracy"] == pytest.approx(one["test_accuracy"])
        assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=2e-5)
    else:
        assert two["settings"]["batch_size"] == one["settings"]["batch_size"] == 4
        figure = "perplexity" if program == "run_ablation" else "error"
        assert two["rows"][0][figure] == pytest.approx(one["rows"][0][figure], rel=1e-4)


def test_two_processes_fine_tune(encoder, glue, tmp_path):
    """On a task, with the predictions for its test rows."""
    task = ["--task_name", "sst2", "--dataset_path", glue, "--do_predict", "--use_cpu"]
    plain = ["--config_overrides", "hidden_dropout_prob=0,classifier_dropout=0", "--max_steps", 4]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "one", *task, *plain))
    run_ranks(
        "finetune_glue", *glue_options(encoder, tmp_path / "two", *task, *plain, "--per_device_train_batch_size", 8)
    )
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert (two["eval_samples"], two["eval_accuracy"]) == (60, pytest.approx(one["eval_accuracy"]))
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=2e-5)
    predicted = [(tmp_path / name / "predict_results_sst2.txt").read_text() for name in ("one", "two")]
    assert predicted[0] == predicted[1] and len(predicted[0].splitlines()) == 21
