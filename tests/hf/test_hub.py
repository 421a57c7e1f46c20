"""The Hub, and transformers' Auto classes."""

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import processes
from helpers.hub_server import HubServer, client, environment
from helpers.scripts import ROOT, run_script, save_model
from tnn_programs.training import publishing as push_to_hub

REPO = "user/tnn"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
ROW = {"length": 256, "stride": None, "perplexity": 79.25, "bits_per_byte": 2.125, "tokens": 4096, "model": "/home/me"}
EVALUATION = {"settings": {"split": "test", "validation_file": None}, "results": [ROW]}


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A model as a training script leaves it, with what must not be published."""
    folder = save_model(tmp_path_factory.mktemp("trained"), tno_type="rpe", decay=0.9)
    (folder / "metrics.json").write_text(json.dumps({"perplexity_before": 301.5, "perplexity": 12.375, "steps": 60}))
    options = {"dataset_name": "user/novels", "max_steps": 60, "learning_rate": 0.003}
    (folder / "training_args.json").write_text(json.dumps(options))
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    torch.save({"step": 60}, folder / "optimizer.pt")
    (folder / "checkpoint-30").mkdir()
    (folder / "checkpoint-30" / "model.safetensors").write_bytes(b"old")
    return folder


def push(hub: HubServer, folder: Path, home: Path, *options) -> dict:
    """The process that publishes."""
    command = [sys.executable, ROOT / "scripts" / "push_to_hub.py", folder, "--repo_id", REPO, *options]
    return {"command": command, "env": environment(hub, home)}


LOAD = """
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
repo = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True)
inputs = tokenizer("The quick brown", return_tensors="pt")
results["text"] = tokenizer.decode(model.generate(**inputs, max_new_tokens=9, do_sample=False)[0])
results["module"] = type(model).__module__
results["body"] = type(AutoModel.from_pretrained(repo, trust_remote_code=True)).__name__
"""


def continuation(folder: Path) -> str:
    """The text that LOAD should find."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The quick brown", return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=9, do_sample=False)[0])


@pytest.mark.slow
def test_interrupted_publication_and_another_attempt(hub, model_folder, tmp_path):
    """A push that is killed while it uploads leaves nothing; the next one is complete and loads by its name."""
    uploading, answer = threading.Event(), threading.Event()
    hub.on_upload = lambda: (uploading.set(), answer.wait(60))
    options = ["--evaluation", model_folder / "evaluation.json", "--max_shard_size", "100KB"]
    with processes.Process(**push(hub, model_folder, tmp_path, *options)):
        assert uploading.wait(120), "nothing was uploaded"
    answer.set()
    hub.on_upload = lambda: None
    assert hub.files(REPO) == {}

    pushed = processes.run(**push(hub, model_folder, tmp_path, *options), check=True)
    assert f"published at {hub.url}/{REPO}" in pushed.stdout
    assert len(hub.repos[REPO].commits) == 2, "the empty one and one more"
    published = hub.files(REPO)
    assert sum(name.endswith(".safetensors") for name in published) > 1
    assert {"config.json", "tokenizer.json", "modeling_tnn.py", "README.md"} <= set(published)
    assert published["length_extrapolation.png"].startswith(b"\x89PNG")
    assert not any(name.endswith(PICKLES) or "checkpoint-" in name for name in published)

    loaded = client(hub, tmp_path, LOAD, REPO)
    assert loaded["module"].startswith("transformers_modules.user.tnn") and loaded["body"] == "TnnModel"
    assert loaded["text"] == continuation(model_folder)


@pytest.mark.slow
def test_card_of_a_publication(hub, model_folder, tmp_path):
    """Metadata and text say what the JSON files say."""
    options = ["--repo_id", "user/paged", "--evaluation", model_folder / "evaluation.json"]
    pushed = processes.run(**push(hub, model_folder, tmp_path, *options), check=True)
    assert pushed.stdout.splitlines() == [f"published at {hub.url}/user/paged"]
    assert "model.safetensors" in hub.files("user/paged")
    card = ModelCard(hub.files("user/paged")["README.md"].decode())
    assert card.data.model_name == "paged" and "| 256 | 79.25 | 2.125 | 4,096 |" in card.text


def test_dry_run(model_folder, tmp_path, monkeypatch, capsys):
    """It lists and writes what would be published, and opens no connection."""
    monkeypatch.setattr("socket.socket.connect", lambda *given: pytest.fail(f"it connects to {given[1]}"))
    given = [model_folder, "--repo_id", REPO, "--private", "--dry_run"]
    run_script("push_to_hub", *given, "--output_dir", tmp_path / "model")
    said = capsys.readouterr().out
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    files = {path.relative_to(tmp_path / "model").as_posix(): path.stat().st_size for path in files}
    assert f"model {REPO} (private if it is new): {len(files)} files" in said and "optimizer.pt" not in said
    assert all(f"  {name}  {size:,} bytes" in said for name, size in files.items())
    assert continuation(tmp_path / "model") == continuation(model_folder)
    with pytest.raises(SystemExit, match="--output_dir must be a new or an empty folder, got"):
        run_script("push_to_hub", *given, "--output_dir", tmp_path / "model")


BY_METHODS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
import modeling_tnn
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("by-method")
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("by-method")
model.save_pretrained("saved", push_to_hub=True, repo_id="by-saving")
model.config.save_pretrained("config", push_to_hub=True, repo_id="by-config")
model.push_to_hub("secret", private=True)
"""


def test_methods_of_transformers(hub, model_folder, tmp_path):
    """They publish the code too, but for a configuration alone."""
    client(hub, tmp_path, BY_METHODS, model_folder, setup="import sys\n")
    for repo in ("by-method", "by-saving", "secret"):
        files = hub.files(f"user/{repo}")
        assert {"config.json", "modeling_tnn.py", "tno_rpe.py", "model.safetensors"} <= set(files)
        assert "AutoModelForMaskedLM" in json.loads(files["config.json"])["auto_map"]
    files = hub.files("user/by-config")
    assert files.keys() == {"config.json"} and "auto_map" not in json.loads(files["config.json"])
    assert hub.repos["user/secret"].private and not hub.repos["user/by-method"].private


def test_errors_of_the_program(model_folder, tmp_path, monkeypatch, capsys):
    """One line, before anything is published."""
    (tmp_path / "lengths.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setattr(push_to_hub, "publish", None)
    evaluation = [model_folder, "--evaluation"]
    for given, message in [
        ([tmp_path / "nothing"], "folder must be a folder .*nothing', which is not a folder here"),
        ([tmp_path], "model must be a TnnForCausalLM or .*, got bert TnnModel"),
        ([*evaluation, model_folder / "metrics.json"], "not a JSON file that the card can read as evaluation"),
        ([*evaluation, tmp_path / "lengths.json"], "lengths.json cannot be read as a JSON file"),
        ([model_folder, "--dry_run", "--repo_id", "a/b/c"], "Repo id must be in the form"),
        ([model_folder, "--output_dir", "x"], "with --dry_run"),
    ]:
        with pytest.raises(SystemExit) as left:
            run_script("push_to_hub", "--repo_id", REPO, *given)
        assert re.search(message, f"{left.value.code} {capsys.readouterr().err}")
