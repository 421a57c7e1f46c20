"""What --dry_run of the programs that train by Trainer says, and that it writes nothing."""

import re

import pytest

from helpers.glue import glue_options
from helpers.scripts import run_script
from helpers.small_runs import ablation_options, image_options, listops_options, synthetic_options
from tnn_scripts.runs import finetune_glue

ESTIMATE = r"about \d+ seconds on 1 x cpu: \d+\.\d\d s a step, [\d,]+ {unit}/s\nabout \d+\.\d GiB of memory\n"


@pytest.mark.parametrize(
    "script, options, unit, size",
    [
        ("run_ablation", ablation_options, "tokens", "2 steps of 128 tokens: 256 tokens"),
        ("run_synthetic", synthetic_options, "rows", "2 steps of 8 rows: 16 rows"),
        ("run_image_classification", image_options, "rows", "2 steps of 4 rows: 8 rows"),
        ("run_lra", listops_options, "tokens", "1 steps of"),
    ],
)
def test_dry_run(script, options, unit, size, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_script(script, *options(tmp_path), "--output_dir", tmp_path / "out", "--dry_run")
    output = capsys.readouterr().out
    assert ended.value.code == 0 and size in output and re.search(ESTIMATE.format(unit=unit), output)
    assert not (tmp_path / "out").exists()


def test_dry_run_of_a_sweep(encoder, glue, tmp_path, capsys, monkeypatch):
    """It opens no repository either."""
    monkeypatch.setattr(finetune_glue, "repository_of", None)
    given = ["--task_name", "sst2", "--dataset_path", glue, "--sweep", "--sweep_seeds", 0, 1, "--dry_run"]
    given += ["--push_to_hub"]
    with pytest.raises(SystemExit) as ended:
        run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *given))
    output = capsys.readouterr().out
    assert ended.value.code == 0 and "8 runs, each:" in output and "40 steps of" in output  # 160 texts, 16, 4 epochs
    assert not (tmp_path / "out").exists()


def test_dry_run_of_several_tasks(encoder, tmp_path, capsys):
    """Their sizes differ, so one estimate would be wrong."""
    with pytest.raises(SystemExit):
        run_script("finetune_glue", *glue_options(encoder, tmp_path, "--task_name", "sst2", "stsb", "--dry_run"))
    assert "--dry_run must be given with one task, got sst2, stsb" in capsys.readouterr().err
