"""No network in the middle of a push or a download: the local model is kept, and no part of one loads."""

import json
import re
import shutil

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from helpers.glue import glue_options
from helpers.hub_server import TOKEN, HangUp, HubServer, client
from helpers.scripts import run_script, save_model, write_config, write_text

NOWHERE = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9", token=TOKEN)


@pytest.fixture
def hub(monkeypatch):
    """A Hub that the scripts of this process use; the client's pauses between attempts are left out."""
    with HubServer() as server:
        api = huggingface_hub.HfApi(endpoint=server.url, token=TOKEN)
        monkeypatch.setattr("modeling_tnn.training.publishing.HfApi", lambda: api)
        monkeypatch.setattr("modeling_tnn.training.publishing.create_repo", api.create_repo)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


def hang_up():
    raise HangUp


def is_refused(message: str, *command):
    with pytest.raises(SystemExit, match=message):
        run_script(*command)


def test_push_without_a_network(hub, tmp_path, monkeypatch):
    """In the middle of the upload, then from the start: what to do later is in the error, and it works."""
    folder = save_model(tmp_path / "model", tno_type="rpe", decay=0.9)
    command = ["push_to_hub", folder, "--repo_id", "user/tnn", "--private"]
    hub.on_upload = hang_up
    is_refused(rf"(?s)Nothing was published: .*\n  tnn push {folder} --repo_id user/tnn --private", *command)
    assert hub.files("user/tnn") == {}
    hub.on_upload = lambda: None
    run_script(*command)
    assert {"model.safetensors", "config.json", "README.md"} < hub.files("user/tnn").keys()
    monkeypatch.setattr("modeling_tnn.training.publishing.HfApi", lambda: NOWHERE)
    is_refused("(?s)Nothing was published: ConnectError.*tnn push", *command)


def test_models_of_finished_cards(hub, tmp_path, capsys):
    """One command publishes each with its card; none if one is missing, or if a card has other figures."""
    models, cards = tmp_path / "models", tmp_path / "cards"
    for name, perplexity in {"a": 12.375, "b": 20.5}.items():
        folder = save_model(models / name, tno_type="rpe", decay=0.9)
        (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity, "steps": 60, "machine": "here"}))
        run_script("model_card", folder, "--repo_id", f"user/{name}", "--output_dir", cards / name)
    command = ["push_to_hub", models, "--cards", cards]
    run_script(*command, "--dry_run")
    assert re.findall(r"would publish the model (\S+)", capsys.readouterr().out) == ["user/a", "user/b"]
    run_script(*command, "--private")
    for name in "ab":
        files, card = hub.files(f"user/{name}"), (cards / name / "README.md").read_text()
        published = files["README.md"].decode()
        assert {"model.safetensors", "tokenizer.json", "modeling_tnn.py", "metrics.json"} <= files.keys()
        assert "not on the Hub yet" in card and "not on the Hub yet" not in published
        assert set(published.splitlines()) < set(card.splitlines())
    hub.repos.clear()
    (models / "b" / "metrics.json").write_text(json.dumps({"perplexity": 21, "steps": 60}))
    is_refused(r"models/b is not that of .*cards/b: their perplexity differ", *command)
    shutil.rmtree(models / "b")
    is_refused("must have a model for each card, got none for b", *command)
    for options in ([], ["--repo_id", "user/a", "--cards", cards], ["--cards", cards, "--space"]):
        is_refused("", "push_to_hub", models, *options)
    assert not hub.repos


def test_pretraining_without_a_network(hub, tmp_path, monkeypatch):
    """The repository is opened before. At its end the model is there, and is published by the command in the error."""
    config, text, out = write_config(tmp_path / "config"), write_text(tmp_path / "text.txt"), tmp_path / "out"
    command = ["pretrain", "--config_name", config, "--train_file", text, "--output_dir", out, "--max_steps", 2]
    hub.on_upload = hang_up
    with monkeypatch.context() as patched:
        patched.setattr("modeling_tnn.training.publishing.create_repo", NOWHERE.create_repo)
        is_refused("repository cannot be opened for --push_to_hub: .*Connect", *command, "--push_to_hub")
    assert not (out / "metrics.json").exists()
    is_refused(r"(?s)Nothing was published: .*\n  tnn push .*/out --repo_id user/out", *command, "--push_to_hub")
    AutoModelForCausalLM.from_pretrained(out)
    hub.on_upload = lambda: None
    run_script("push_to_hub", out, "--repo_id", "user/out")
    assert "metrics.json" in hub.files("user/out")


def test_publication_of_a_finetuned_model(hub, encoder, glue, tmp_path):
    """It has the code and the measurements, and none of the pickles that Trainer writes."""
    given = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 2, "--push_to_hub"]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *given, "--hub_model_id", "user/sentiment"))
    files = hub.files("user/sentiment")
    assert {"model.safetensors", "tokenizer.json", "modeling_tnn.py", "README.md"} < files.keys()
    assert not any(name.endswith((".bin", ".pt")) for name in files)
    card = files["README.md"].decode()
    accuracy = json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_accuracy"]
    assert f"| accuracy | {accuracy:.4f} |" in card and "| learning_rate | 0.01 |" in card and "sst2" in card


# The client waits a second before each of its attempts.
IMPATIENT = "import sys, time\nwait = time.sleep\ntime.sleep = lambda seconds: wait(min(seconds, 0.05))\n"
DOWNLOAD = """
from transformers import AutoModelForCausalLM
import modeling_tnn
for name, repo, options in json.loads(sys.argv[1]):
    try:
        model = AutoModelForCausalLM.from_pretrained(repo, **options)
        results[name] = sum(parameter.double().sum().item() for parameter in model.parameters())
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"
"""


@pytest.mark.slow
def test_download_that_breaks_off(hub, tmp_path):
    """The remaining part does not load, neither online nor from the cache; another attempt is complete."""
    folder = save_model(tmp_path / "model", tno_type="rpe", decay=0.9)
    for repo, size in (("user/one", "5GB"), ("user/shards", "100KB")):
        run_script("push_to_hub", folder, "--repo_id", repo, "--max_shard_size", size)
    second = sorted(name for name in hub.files("user/shards") if name.endswith(".safetensors"))[1]
    hub.cut = {"user/one/model.safetensors": 40_000, f"user/shards/{second}": 1000}
    attempts = [
        (f"{repo}, {name}", f"user/{repo}", options)
        for repo in ("one", "shards")
        for name, options in (("from the Hub", {}), ("from the cache", {"local_files_only": True}))
    ]
    broken = client(hub, tmp_path, DOWNLOAD, json.dumps(attempts), setup=IMPATIENT)
    hub.cut.clear()
    whole = client(hub, tmp_path, DOWNLOAD, json.dumps(attempts), setup=IMPATIENT)
    parameters = AutoModelForCausalLM.from_pretrained(folder).parameters()
    expected = sum(parameter.double().sum().item() for parameter in parameters)
    assert all(isinstance(error, str) for error in broken.values()), broken
    assert all("peer closed connection" in broken[f"{repo}, from the Hub"] for repo in ("one", "shards")), broken
    assert f"{second} is missing" in broken["shards, from the cache"]
    assert all(total == pytest.approx(expected, abs=1e-9) for total in whole.values())
