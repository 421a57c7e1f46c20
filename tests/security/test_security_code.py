"""What our code does not do: read pickles, run texts as code, start shells.

Ruff's rules S (flake8-bandit) check most of it in `make lint`; here is what they do not know.
"""

import ast
import shutil

import pytest
import torch

from helpers.scripts import ROOT, Malicious, run_script, write_config, write_text
from tnn_cli.atomic import write_checksums

SOURCES = sorted([*ROOT.glob("modeling_tnn/*.py"), *ROOT.rglob("scripts/**/*.py")])
# Keywords that must not have this value, wherever they stand.
UNSAFE = {"allow_pickle": "True", "weights_only": "False", "trust_remote_code": "True", "verify": "False"}


def unsafe_calls(source: str) -> list[str]:
    """Calls that could run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            found += [f"{key}={value}" for key, value in keywords.items() if UNSAFE.get(key) == value]
            if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") != "True":
                found.append("torch.load")
    return found


def test_sources():
    assert not {path.name: unsafe_calls(path.read_text()) for path in SOURCES if unsafe_calls(path.read_text())}
    for source in ("torch.load(f)", "torch.load(f, weights_only=False)", "read(f, allow_pickle=True)"):
        assert unsafe_calls(source), "the check sees nothing"


def test_pickles_of_a_checkpoint_run_nothing(tmp_path):
    """A checkpoint from elsewhere, whose checksums fit: of its states only tensors and plain values are read."""
    config, text, out = write_config(tmp_path / "config"), write_text(tmp_path / "text.txt"), tmp_path / "out"
    command = ["pretrain", "--config_name", config, "--train_file", text, "--max_steps", 4,
               "--checkpointing_steps", 2]  # fmt: skip
    run_script(*command, "--output_dir", out)
    for name in ("optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        folder, victim = tmp_path / name / "checkpoint-2", tmp_path / "executed"
        shutil.copytree(out / "checkpoint-2", folder)
        torch.save({"state": Malicious(victim)}, folder / name)
        write_checksums(folder)
        with pytest.raises(SystemExit, match="checkpoint-2 cannot be read: "):
            run_script(*command, "--output_dir", folder.parent, "--resume_from_checkpoint", "latest")
        assert not victim.exists()
