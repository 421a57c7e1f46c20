"""Files that are damaged, missing or hostile: what loads is what was saved, or an error names the file."""

import json
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging

from helpers.models import seeded, tiny_config
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
    for name in ("gut", "gtu2", "mixer.gtu", "gtu_norm"):  # not names of an earlier version
        renamed = {one.replace("layers.0.mixer.", f"layers.0.{name}."): value for one, value in weights.items()}
        save_file(renamed, folder / WEIGHTS, {"format": "pt"})
        refuses(folder, "damaged or belong to another model: layers.0.mixer.u_proj.weight is missing")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tno_type": "explicit"}))
    taps = "damaged or belong to another model: layers.0.mixer.tno.taps is missing, .* ignore_mismatched_sizes=True"
    refuses(folder, taps)
    TnnForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_another_head_or_depth_is_no_damage(folder, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(folder)
    TnnModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    TnnForCausalLM.from_pretrained(tmp_path / "body")
    seeded(TnnForMaskedLM, tiny_config(causal=False)).save_pretrained(tmp_path / "masked")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "masked")
    for layers in (1, 3):
        assert len(AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers).model.layers) == layers
