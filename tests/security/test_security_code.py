"""What our code does not do: read pickles, run texts as code, start shells.

Ruff's rules S (flake8-bandit) check most of it in `make lint`; here is what they do not know.
"""

import ast
import shutil

import pytest
import torch

from helpers.scripts import ROOT, Malicious, run_script, write_config, write_text
from tnn_scripts.common.checkpoints import write_checksums

SOURCES = sorted([*ROOT.glob("modeling_tnn/*.py"), *ROOT.rglob("scripts/**/*.py")])
# Keywords that must not have this value, wherever they stand.
UNSAFE_KEYWORDS = {
    ("allow_pickle", "True"),
    ("weights_only", "False"),
    ("trust_remote_code", "True"),
    ("verify", "False"),
}


def unsafe_calls(source: str) -> list[str]:
    """Calls that could run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            found += [f"{key}={value}" for key, value in keywords.items() if (key, value) in UNSAFE_KEYWORDS]
            if ast.unparse(node.func) == "torch.load" and keywords.get("weights_only") != "True":
                found.append("torch.load")
    return found


def test_sources():
    assert not {path.name: unsafe_calls(path.read_text()) for path in SOURCES if unsafe_calls(path.read_text())}


@pytest.mark.parametrize(
    "source", ["torch.load(f)", "torch.load(f, weights_only=False)", "read(f, allow_pickle=True)"]
)
def test_the_check_sees(source):
    assert unsafe_calls(source)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with a checkpoint, and its options."""
    folder = tmp_path_factory.mktemp("run")
    options = ["--config_name", write_config(folder / "config"), "--train_file", write_text(folder / "text.txt"),
               "--max_steps", 4, "--checkpointing_steps", 2, "--output_dir", folder / "out"]  # fmt: skip
    run_script("pretrain", *options)
    return folder / "out", options


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_pickles_of_a_checkpoint_run_nothing(name, run_folder, tmp_path):
    """A checkpoint from elsewhere, whose checksums fit: of its states only tensors and plain values are read."""
    out, options = run_folder
    shutil.copytree(out / "checkpoint-2", tmp_path / "checkpoint-2")
    victim = tmp_path / "executed"
    torch.save({"state": Malicious(victim)}, tmp_path / "checkpoint-2" / name)
    write_checksums(tmp_path / "checkpoint-2")
    with pytest.raises(SystemExit, match="checkpoint-2 cannot be read: "):
        run_script("pretrain", *options, "--output_dir", tmp_path, "--resume_from_checkpoint", "latest")
    assert not victim.exists()
