"""Publishing and loading through the Hub's own client, against a Hub on loopback."""

import json
import re
import shutil
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, SpaceCard
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_tnn
from helpers import processes
from helpers.hub_client import client, environment
from helpers.hub_server import TOKEN, HubServer
from helpers.scripts import run_script, save_model
from tnn_scripts import push_to_hub as program
from tnn_scripts.common import publishing as push_to_hub
from tnn_scripts.common import space
from tnn_scripts.options.card import build_publishing_parser

ROOT = Path(__file__).parents[2]
REPO = "user/tnn"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
LENGTHS = [(32, None, 81.5), (32, 16, 70.0), (256, None, 79.25)]
SCORED = {"bits_per_byte": 2.125, "tokens": 4096, "model": "/home/me"}
EVALUATION = {
    "settings": {"dataset_name": "user/novels", "split": "test", "validation_file": None},
    "results": [{"length": n, "stride": s, "perplexity": p} | SCORED for n, s, p in LENGTHS],
}


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
    script = str(ROOT / "scripts" / "push_to_hub.py")
    command = [sys.executable, script, str(folder), "--repo_id", REPO, *map(str, options)]
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


def test_card_of_a_publication(hub, model_folder, tmp_path):
    """Metadata and text say what the JSON files say."""
    repo = "user/carded"
    options = ["--repo_id", repo, "--evaluation", model_folder / "evaluation.json"]
    processes.run(**push(hub, model_folder, tmp_path, *options), check=True)
    card = ModelCard(hub.files(repo)["README.md"].decode())
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.datasets == ["user/novels"] and card.data.model_name == "carded"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("perplexity", 12.375, "user/novels")
    for expected in (
        "| perplexity | 12.38 |",
        "| 256 | 79.25 | 2.125 | 4,096 |",
        "| learning_rate | 0.003 |",
        f'"{repo}"',
    ):
        assert expected in card.text
    parameters = AutoModelForCausalLM.from_pretrained(model_folder).num_parameters()
    assert f"{parameters:,} parameters" in card.text


def test_space(hub, model_folder, tmp_path, monkeypatch):
    """A page of the model that was published, by files that say what it runs with."""
    options = ["--repo_id", "user/paged", "--space", "--package", "modeling-tnn[scripts,space] @ file:///wheel"]
    pushed = processes.run(**push(hub, model_folder, tmp_path, *options), check=True)
    assert pushed.stdout.splitlines() == [f"published at {hub.url}/{at}user/paged" for at in ("", "spaces/")]
    assert "model.safetensors" in hub.files("user/paged")
    files = {name: content.decode() for name, content in hub.files("spaces/user/paged").items()}
    assert files.keys() == {"app.py", "requirements.txt", "README.md"}
    card = SpaceCard(files["README.md"]).data
    assert (card.sdk, card.app_file, card.models, card.title) == ("gradio", "app.py", ["user/paged"], "paged")
    assert card.python_version == "3.11" and card.license == "apache-2.0"
    requirements = [line for line in files["requirements.txt"].splitlines() if line[0] not in "#-"]
    assert requirements[0] == "modeling-tnn[scripts,space] @ file:///wheel"
    assert [line.partition("==")[0] for line in requirements[1:]] == ["torch", "transformers"]
    assert all(re.fullmatch(r"[\w-]+==[0-9.]+", line) for line in requirements[1:])

    served = []
    monkeypatch.setattr("tnn_scripts.serving.page.serve", served.append)
    exec(compile(files["app.py"], "app.py", "exec"), {})
    assert [(args.model_name_or_path, args.host, args.port) for args in served] == [("user/paged", None, None)]


def test_dry_run(model_folder, tmp_path, monkeypatch, capsys):
    """It lists and writes what would be published, and opens no connection."""
    monkeypatch.setattr("socket.socket.connect", lambda *given: pytest.fail(f"it connects to {given[1]}"))
    given = [model_folder, "--repo_id", REPO, "--private", "--dry_run"]
    run_script("push_to_hub", *given, "--output_dir", tmp_path / "model")
    said = capsys.readouterr().out
    files = {path.name: path.stat().st_size for path in (tmp_path / "model").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "modeling_tnn.py"} <= files.keys()
    assert f"model {REPO} (private if it is new): {len(files)} files" in said and "optimizer.pt" not in said
    assert all(f"  {name}  {size:,} bytes" in said for name, size in files.items())
    assert continuation(tmp_path / "model") == continuation(model_folder)
    with pytest.raises(SystemExit, match="--output_dir must be a new or an empty folder, got"):
        run_script("push_to_hub", *given, "--output_dir", tmp_path / "model")
    run_script("push_to_hub", *given, "--space")
    assert f"Space {REPO} (private if it is new): 3 files" in capsys.readouterr().out
    for options, message in (
        (["--repo_id", "a/b/c"], "Repo id must be in the form"),
        (["--output_dir", "x"], "with --dry_run"),
    ):
        with pytest.raises(SystemExit) as left:
            run_script("push_to_hub", *(given if "a/b/c" in options else given[:-1]), *options)
        assert message in f"{left.value.code} {capsys.readouterr().err}"


def test_what_a_space_installs():
    """This release with what the page imports, and the Gradio that pyproject.toml allows and CI pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, extras = re.match(r"([\w-]+)\[([\w,]+)\]==", space.PACKAGE).groups()
    assert space.PACKAGE.endswith(f"=={modeling_tnn.__version__}") and name == project["name"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (gradio,) = map(Requirement, project["optional-dependencies"]["space"])
    assert gradio.name == "gradio" and space.GRADIO in gradio.specifier
    assert f"gradio=={space.GRADIO}" in (ROOT / ".ci" / "constraints.txt").read_text().splitlines()


def test_a_space_without_a_page(model_folder, tmp_path):
    """Nothing is published of a model that cannot write."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("TnnForCausalLM", "TnnModel"))
    args = build_publishing_parser().parse_args([str(folder), "--repo_id", REPO, "--space"])
    with pytest.raises(ValueError, match="holds a TnnModel: only a TnnForCausalLM has a page"):
        push_to_hub.run(args, "tnn push")


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


@pytest.fixture(scope="module")
def by_methods(hub, model_folder, tmp_path_factory):
    """The files that the methods of transformers publish."""
    client(hub, tmp_path_factory.mktemp("publisher"), BY_METHODS, model_folder, setup="import sys\n")


def test_a_configuration_alone_carries_no_code(hub, by_methods):
    files = hub.files("user/by-config")
    assert files.keys() == {"config.json"} and "auto_map" not in json.loads(files["config.json"])


@pytest.mark.parametrize("repo", ["by-method", "by-saving", "secret"])
def test_methods_of_transformers_publish_the_code_too(repo, hub, by_methods):
    files = hub.files(f"user/{repo}")
    assert {"config.json", "modeling_tnn.py", "tno_rpe.py"} <= set(files)
    assert "AutoModelForMaskedLM" in json.loads(files["config.json"])["auto_map"]
    assert "model.safetensors" in files


FAIL = """
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM

for name, repo, options in json.loads(sys.argv[1]):
    try:
        AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True, **options)
        results[name] = "loaded"
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"
checked = HfApi().verify_repo_checksums(sys.argv[2])
results["verified"] = [mismatch["path"] for mismatch in checked.mismatches]
"""


def test_what_must_not_load(hub, by_methods, tmp_path):
    """No token for a private repository, no such repository or revision, a file that is cut off or changed."""
    hub.tamper["user/by-saving/model.safetensors"] = lambda content: content[:-7]
    hub.tamper["user/by-method/model.safetensors"] = lambda content: content[:-1] + bytes([content[-1] ^ 1])
    attempts = [
        ("no token", "user/secret", {"token": False}),
        ("token", "user/secret", {"token": TOKEN}),
        ("no repository", "user/nothing", {}),
        ("no revision", "user/secret", {"revision": "v9"}),
        ("revision", "user/secret", {"revision": hub.repos["user/secret"].head}),
        ("cut", "user/by-saving", {}),
        ("changed", "user/by-method", {}),
    ]
    results = client(hub, tmp_path, FAIL, json.dumps(attempts), "user/by-method")
    hub.tamper.clear()
    assert results["token"] == results["revision"] == "loaded"
    for name in ("no token", "no repository"):
        assert results[name].startswith("OSError") and "not a valid model identifier" in results[name], results[name]
    assert "v9 is not a valid git identifier" in results["no revision"]
    assert "Consistency check failed" in results["cut"]
    # The client compares sizes when it downloads, and hashes when it is asked to.
    assert results["verified"] == ["model.safetensors"]


def test_errors_of_the_script(model_folder, tmp_path, monkeypatch):
    """One line, before anything is published."""
    (tmp_path / "lengths.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    arguments = ["push_to_hub.py", "--repo_id", REPO]
    monkeypatch.setattr(push_to_hub, "publish", None)
    for more, message in [
        ([tmp_path / "nothing"], "folder must be a folder .*nothing', which is not a folder here"),
        ([tmp_path], "model must be a TnnForCausalLM or .*, got bert TnnModel"),
        (
            [model_folder, "--evaluation", model_folder / "metrics.json"],
            "not a JSON file that the card can read as evaluation",
        ),
        ([model_folder, "--evaluation", tmp_path / "lengths.json"], "lengths.json cannot be read as a JSON file"),
    ]:
        monkeypatch.setattr(sys, "argv", [*arguments, *map(str, more)])
        with pytest.raises(SystemExit, match=message):
            program.main()
