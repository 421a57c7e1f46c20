"""`docs/research/gpu.py` at tiny sizes on a CPU, with the commands and options that a GPU gets."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

PROGRAM = Path(__file__).parents[2] / "docs" / "research" / "gpu.py"


def test_names(monkeypatch, capsys):
    """--only takes beginnings of names, and says which there are."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--list", "--only", "lm-rpe-1", "copying"])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["lm-rpe-1e-3", "copying-64", "copying-256"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "no-such"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert "state-size" in capsys.readouterr().err


@pytest.mark.slow
def test_each_kind_runs_once(tmp_path):
    """What has figures is left out the second time."""
    rows = [" ".join(f"word{(17 * i + j) % 97}" for j in range(300)) for i in range(12)]
    for split in ("train", "validation"):
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    reviews = Dataset.from_dict({"text": rows, "label": [0, 1] * 6})
    for split in ("train", "test"):
        reviews.to_parquet(tmp_path / "lra" / "imdb" / f"{split}.parquet")
    (tmp_path / "lra" / "README.md").write_text("---\nconfigs:\n- {config_name: imdb, data_dir: imdb}\n---\n")
    names = ["lm-hybrid-1e-3", "lm-mamba2-1e-3", "copying-64", "fd-speed", "long-range"]
    names += ["state-size", "lra-listops", "lra-text"]
    options = ["--quick", "--minutes", 60, "--output_dir", tmp_path / "out", "--text", tmp_path]
    options += ["--lra", tmp_path / "lra", "--only", *names]
    for attempt in range(2):
        done = subprocess.run([sys.executable, PROGRAM, *map(str, options)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was there") == len(names) * attempt
    records = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names}
    assert all(records[name]["figures"]["steps"] == 2 for name in names[:2])
    assert records["copying-64"]["figures"]["rows"] and records["fd-speed"]["figures"]["rows"]
    assert records["fd-speed"]["quick"] and records["fd-speed"]["device"] == "cpu"
