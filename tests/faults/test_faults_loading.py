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
def shards(model, tmp_path) -> Path:
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    return tmp_path / "many"


def refuses(folder: Path, message: str, load=AutoModelForCausalLM):
    with pytest.raises(ValueError, match=message):
        load.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
@pytest.mark.parametrize("load", [AutoModelForCausalLM, TnnModel, AutoModelForSequenceClassification])
def test_truncated(kept, load, folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(kept * len(content)) if kept == 0.5 else kept])
    refuses(folder, rf"one/{WEIGHTS} is damaged", load)


def test_longer(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"more")
    refuses(folder, rf"{WEIGHTS} is damaged")


def test_flipped_bits_of_the_header(model, folder):
    """Each of 100 single ones is refused or changes nothing: no weight is left random."""
    content, expected = (folder / WEIGHTS).read_bytes(), model.state_dict()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    randomness, refused = random.Random(0), 0
    logging.set_verbosity_error()
    for _ in range(100):
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
    assert refused > 90


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


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_header(content, folder):
    (folder / WEIGHTS).write_bytes(content)
    refuses(folder, rf"one/{WEIGHTS} is damaged")


def test_missing_shard(shards):
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    refuses(shards, rf"incomplete: {gone.name} is missing")


def test_truncated_shard(shards):
    damaged = sorted(shards.glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-5])
    refuses(shards, rf"{damaged.name} is damaged")


def test_shards_in_each_others_place(shards):
    """Before this was compared, what a shard lacked was silently random."""
    first, second, *_ = sorted(shards.glob("*.safetensors"))
    shutil.copy(first, second)
    refuses(shards, rf"incomplete: {second.name} is missing, or does not have .*layers")


@pytest.mark.parametrize(
    "place", ["../one/model.safetensors", "ABSOLUTE", "..\\one\\model.safetensors", "..", 3, None]
)
def test_shard_somewhere_else(place, folder, shards):
    """Other files of this machine are not read, whatever an index says."""
    place = str((folder / WEIGHTS).resolve()) if place == "ABSOLUTE" else place
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], place)
    (shards / INDEX).write_text(json.dumps(index))
    refuses(shards, "must be a safetensors file beside it, got")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"weight_map": []}', '{"a":' * 10**5])
def test_broken_index(content, shards):
    (shards / INDEX).write_text(content)
    refuses(shards, rf"{INDEX} is not an index")


def test_weights_of_another_operator(folder):
    """Some names are missing and others left over: random weights would pass for trained ones."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tno_type": "explicit"}))
    refuses(
        folder,
        "damaged or belong to another model: layers.0.mixer.tno.taps is missing, .* ignore_mismatched_sizes=True",
    )
    TnnForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("name", ["gut", "gtu2", "mixer.gtu", "gtu_norm"])
def test_a_damaged_name_is_no_name_of_an_earlier_version(name, folder):
    weights = load_file(folder / WEIGHTS)
    renamed = {one.replace("layers.0.mixer.", f"layers.0.{name}."): value for one, value in weights.items()}
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})
    refuses(folder, "damaged or belong to another model: layers.0.mixer.u_proj.weight is missing")


def test_another_head_is_no_damage(folder, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(folder)
    TnnModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    TnnForCausalLM.from_pretrained(tmp_path / "body")
    seeded(TnnForMaskedLM, tiny_config(causal=False)).save_pretrained(tmp_path / "masked")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "masked")
    AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=1)
    AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3)
