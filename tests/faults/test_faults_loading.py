"""Damaged, misplaced or foreign weights are refused; a push or download that breaks off leaves the model."""

import json
import random
import re
import runpy
import shutil
import struct
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging

from helpers.hub_server import TOKEN, HangUp, HubServer, client
from helpers.models import seeded, tiny_config
from helpers.scripts import ROOT, run_script, save_model
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> TnnForCausalLM:
    return seeded(TnnForCausalLM, tiny_config(tie_word_embeddings=False))


@pytest.fixture
def folder(model, tmp_path) -> Path:
    model.save_pretrained(tmp_path / "one")
    return tmp_path / "one"


@pytest.fixture
def shards(model, tmp_path) -> list[Path]:
    """The files of a model in more than two."""
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    return files


def refuses(folder: Path, message: str, load=AutoModelForCausalLM):
    with pytest.raises(ValueError, match=message):
        load.from_pretrained(folder)


def header(content: dict | bytes, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], start: int = 0, stop: int = 4) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "announces a huge header": struct.pack("<Q", 2**62) + b"{}",
    "nested deeply": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "negative shape": header({"a": tensor([-1])}, b"0000"),
    "product of sizes overflows": header({"a": tensor([2**40, 2**40])}, b"0000"),
    "more than there is": header({"a": tensor([2**40], 0, 2**42)}, b"0000"),
    "one place for two": header({"a": tensor([1]), "b": tensor([1])}, b"0000"),
    "unknown type": header({"a": tensor([1]) | {"dtype": "O"}}, b"0000"),
    "no utf-8": header(b'{"\xff\xfe": {}}'),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


def test_damaged_weights(folder):
    """Cut off, too long, or with a header of any shape."""
    content = (folder / WEIGHTS).read_bytes()
    cut = {f"cut at {place}": content[:place] for place in (0, 4, 8, 100, len(content) // 2, -1)}
    for name, damaged in {"longer": content + b"more", **HOSTILE, **cut}.items():
        (folder / WEIGHTS).write_bytes(damaged)
        for load in (AutoModelForCausalLM, TnnModel, AutoModelForSequenceClassification)[: 3 if name in cut else 1]:
            refuses(folder, rf"one/{WEIGHTS} is damaged", load)


def test_flipped_bits_of_the_header(model, folder):
    """Each of 50 single ones is refused or changes nothing: no weight is left random."""
    content, expected = (folder / WEIGHTS).read_bytes(), model.state_dict()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    randomness, refused = random.Random(0), 0
    logging.set_verbosity_error()
    for _ in range(50):
        damaged = bytearray(content)
        damaged[randomness.randrange(end)] ^= 1 << randomness.randrange(8)
        (folder / WEIGHTS).write_bytes(damaged)
        try:
            loaded = TnnForCausalLM.from_pretrained(folder).state_dict()
        except ValueError:
            refused += 1
            continue
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    logging.set_verbosity_warning()
    assert refused > 45


def test_shards(shards):
    """One in another's place, cut off, missing: what a shard lacks is never silently random."""
    first, second, *_ = shards
    content = second.read_bytes()
    shutil.copy(first, second)
    refuses(second.parent, rf"incomplete: {second.name} is missing, or does not have .*layers")
    second.write_bytes(content[:-5])
    refuses(second.parent, rf"{second.name} is damaged")
    second.unlink()
    refuses(second.parent, rf"incomplete: {second.name} is missing")


def test_index_of_shards(folder, shards):
    """Other files of this machine are not read, whatever an index says; one of another form is refused."""
    index = shards[0].with_name(INDEX)
    names = json.loads(index.read_text())["weight_map"]
    absolute = str((folder / WEIGHTS).resolve())
    for place in ("../one/model.safetensors", absolute, "..\\one\\model.safetensors", "..", 3, None):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
        refuses(index.parent, "must be a safetensors file beside it, got")
    for content in ("", "{", "[]", "3", "{}", '{"weight_map": []}', '{"a":' * 10**5):
        index.write_text(content)
        refuses(index.parent, rf"{INDEX} is not an index")


def test_weights_of_another_model(folder):
    """Some names are missing and others left over: random weights would pass for trained ones."""
    weights, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    renamed = {one.replace("layers.0.mixer.", "layers.0.gtu."): value for one, value in weights.items()}
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})
    refuses(folder, "damaged or belong to another model: layers.0.mixer.u_proj.weight is missing")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tno_type": "explicit"}))
    taps = "damaged or belong to another model: layers.0.mixer.tno.taps is missing, .* ignore_mismatched_sizes=True"
    refuses(folder, taps)
    TnnForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.complex64])
def test_weights_that_are_whole_numbers(dtype, folder):
    """transformers would read them as floating-point ones, and serve what they give."""
    weights = load_file(folder / WEIGHTS)
    save_file(
        weights | {"model.norm.weight": weights["model.norm.weight"].to(dtype)}, folder / WEIGHTS, {"format": "pt"}
    )
    refuses(folder, "norm.weight must have floating-point numbers, got [BIC]")
    for good in (torch.float16, torch.bfloat16, torch.float64):
        save_file({name: weight.to(good) for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})
        AutoModelForCausalLM.from_pretrained(folder, self_check=False)


def test_another_head_or_depth_is_no_damage(folder, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(folder)
    TnnModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    TnnForCausalLM.from_pretrained(tmp_path / "body")
    seeded(TnnForMaskedLM, tiny_config(causal=False)).save_pretrained(tmp_path / "masked")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "masked")
    for layers in (1, 3):
        assert len(AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers).model.layers) == layers


NOWHERE = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9", token=TOKEN)


@pytest.fixture
def hub(monkeypatch):
    """A Hub that the scripts of this process use; the client's pauses between attempts are left out."""
    with HubServer() as server:
        api = huggingface_hub.HfApi(endpoint=server.url, token=TOKEN)
        monkeypatch.setattr("tnn_programs.training.publishing.HfApi", lambda: api)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


def hang_up():
    raise HangUp


def is_refused(message: str, *command):
    with pytest.raises(SystemExit, match=message):
        run_script(*command)


def test_models_of_finished_cards(hub, tmp_path, monkeypatch, capsys):
    """One command publishes each with its card; none if one is missing, or if a card has other figures."""
    models, cards = tmp_path / "models", tmp_path / "cards"
    for name, perplexity in {"a": 12.375, "b": 20.5}.items():
        folder = save_model(models / name, tno_type="rpe", decay=0.9)
        (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity, "steps": 60, "machine": "here"}))
        run_script("push_to_hub", folder, f"--repo_id user/{name} --dry_run --card_dir", cards / name)
    capsys.readouterr()
    program = runpy.run_path(str(ROOT / "docs/research/publish_cards.py"))["main"]

    def publish(*options):
        monkeypatch.setattr(sys, "argv", ["publish_cards.py", *map(str, [models, "--cards", cards, *options])])
        program()

    publish("--dry_run")
    assert re.findall(r"would publish the model (\S+)", capsys.readouterr().out) == ["user/a", "user/b"]
    publish("--private")
    for name in "ab":
        files, card = hub.files(f"user/{name}"), (cards / name / "README.md").read_text()
        published = files["README.md"].decode()
        assert {"model.safetensors", "tokenizer.json", "modeling_tnn.py", "metrics.json"} <= files.keys()
        assert "not on the Hub yet" in card and "not on the Hub yet" not in published
        assert set(published.splitlines()) < set(card.splitlines())
    hub.repos.clear()
    (models / "b" / "metrics.json").write_text(json.dumps({"perplexity": 21, "steps": 60}))
    with pytest.raises(SystemExit, match=r"models/b is not that of .*cards/b: their perplexity differ"):
        publish()
    shutil.rmtree(models / "b")
    with pytest.raises(SystemExit, match="must have a model for each card, got none for b"):
        publish()
    assert not hub.repos


def test_publication_without_a_network(hub, tmp_path):
    """The error names the command that publishes the model later: with its code, figures and a card."""
    out = save_model(tmp_path / "out", tno_type="rpe", decay=0.9)
    (out / "metrics.json").write_text(json.dumps({"perplexity": 12.375, "steps": 60}))
    command = ["push_to_hub", out, "--repo_id", "user/out", "--private"]
    hub.on_upload = hang_up
    is_refused(r"(?s)Nothing was published: .*\n  tnn push .*/out --repo_id user/out --private", *command)
    hub.on_upload = lambda: None
    run_script(*command)
    saved = {"config.json", "model.safetensors", "tokenizer.json", "metrics.json", "README.md", "modeling_tnn.py"}
    assert saved < hub.files("user/out").keys() and hub.repos["user/out"].private


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
