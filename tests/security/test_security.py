"""Untrusted checkpoints: a tampered configuration, a pickle instead of weights."""

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.models import seeded, tiny_config
from helpers.scripts import Malicious, run
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, TnnModel

TAMPERED = [
    # Huge sizes.
    ("vocab_size", 10**12, "in [1, 16,777,216]"),
    ("hidden_size", 2**40, "in [1, 16,777,216]"),
    ("num_hidden_layers", 10**9, "in [1, 1,024]"),
    ("intermediate_size", 10**12, "in [1, 16,777,216]"),
    ("gtu_expansion", 1e12, "in [1, 16,777,216]"),
    ("gtu_expansion", float("inf"), "in [1, 16,777,216]"),
    ("rpe_dim", 10**10, "in [1, 16,777,216]"),
    ("rpe_layers", 10**8, "in [0, 128]"),
    ("max_position_embeddings", 10**15, "in [1, 16,777,216]"),
    ("fd_resolution", 2**50, "a power of two in [1, 33,554,432]"),
    ("ski_rank", 10**12, "in [1, 16,777,216]"),
    ("rtf_state_size", 10**12, "in [1, 16,777,216]"),
    ("s4d_state_size", 10**12, "in [1, 16,777,216]"),
    ("num_modes", 10**12, "in [1, 16,777,216]"),
    ("num_labels", 10**12, "at most"),
    # No sizes, no numbers.
    ("hidden_size", -1, "in [1, 16,777,216]"),
    ("fd_resolution", -4, "a power of two in [1, "),
    ("decay", float("nan"), "in (0, 1]"),
    ("s4d_dt_max", float("inf"), "in (0, 1000]"),
    ("layer_norm_eps", float("nan"), "above 0"),
    ("initializer_range", float("inf"), "above 0"),
    ("hidden_dropout_prob", float("nan"), "in [0, 1)"),
    # Wrong types.
    ("hidden_size", "32", "expected int, got str"),
    ("hidden_size", True, "expected int, got bool"),
    ("vocab_size", None, "expected int, got NoneType"),
    ("causal", 1, "expected bool, got int"),
    ("decay", "0.9", "expected int, got str"),
    ("tno_type", ["rpe"], "expected str, got list"),
    ("eos_token_id", "2", "expected int, got str"),
    # Unknown variants and texts that look like paths or code.
    ("tno_type", "quantum", "one of 'rpe'"),
    ("tno_type", "../../modeling_evil", "one of 'rpe'"),
    ("hidden_act", "os.system", "one of 'gelu'"),
    ("rpe_act", "/tmp/act.py", "one of 'gelu'"),
    ("norm_type", "/etc/passwd", "one of 'simplermsnorm'"),
    ("tno_implementation", "file:///evil", "one of 'auto', 'fused'"),
    ("dtype", "os.system", "field of a wrong kind"),
]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(path)
    return path


@pytest.mark.parametrize("field, value, message", TAMPERED, ids=[f"{f}={v}" for f, v, _ in TAMPERED])
def test_tampered_configuration(field, value, message, folder):
    """Refused with the name of the field, the value and what is allowed, before memory is spent."""
    original = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(original) | {field: value}))
    before = peak_megabytes()
    try:
        with pytest.raises(Exception) as error:
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        (folder / "config.json").write_text(original)
    assert message in str(error.value)
    assert field in str(error.value) or field == "dtype"
    assert peak_megabytes() - before < 100


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("vocab_size", 10**7, r"embed_tokens.weight must be \(99, 32\), got \(10000000, 32\)"),
        ("intermediate_size", 10**7, r"gate_proj.weight must be .*, got \(10000000, 32\)"),
        ("rpe_dim", 10**7, r"in_proj.weight must be .*, got \(10000000, 1\)"),
        ("num_hidden_layers", 99, "declares more than the checkpoint holds: .* layers.2."),
        ("num_hidden_layers", 1000, "declares more than the checkpoint holds: 1000 layers instead of 2"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_sizes_that_are_not_those_of_the_weights(field, value, message, shards, folder, tmp_path):
    """Within the limits, but more than the files hold: refused before it is allocated."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(
        tmp_path, max_shard_size="5GB" if shards == 1 else "40KB"
    )
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    before = peak_megabytes()
    for load in (AutoModelForCausalLM, TnnModel, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)
    assert peak_megabytes() - before < 200


GRIDS = [
    ("fd", {"fd_resolution": 2**25}, "fd_resolution"),
    ("fd", {"fd_resolution": None, "max_position_embeddings": 2**24}, "fd_resolution"),
    ("rtf", {"rtf_truncation_length": 2**20}, "rtf_truncation_length"),
    ("rtf", {"rtf_truncation_length": 2**20, "max_position_embeddings": 2**20}, "rtf_truncation_length"),
    ("ski", {"ski_grid_length": 2**24}, "ski_grid_length"),
]


@pytest.mark.parametrize("tno_type, fields, name", GRIDS)
def test_grids_out_of_proportion(tno_type, fields, name, tmp_path, capsys):
    """No weight has their size. A folder cannot lift the limit, who loads it can, and nothing is built before."""
    head = TnnForMaskedLM if tno_type == "ski" else TnnForCausalLM
    seeded(head, tiny_config(tno_type, tno_type != "ski")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config))
    for load in (AutoConfig, head, TnnModel):
        with pytest.raises(ValueError, match=f"`{name}` must be at most .*max_kernel_length must be given to from_p"):
            load.from_pretrained(tmp_path)
    assert run("plan", "--config_name", tmp_path, "--lengths", 16, check=False).returncode == 2
    assert getattr(AutoConfig.from_pretrained(tmp_path, max_kernel_length=2**25), name) >= 2**20
    assert getattr(AutoConfig.from_pretrained(tmp_path, **{name: 2**21}), name) == 2**21  # asked for by the caller
    path.write_text(json.dumps(config | {"max_kernel_length": 2**30}))
    with pytest.raises(ValueError, match=f"`{name}` must be at most"):
        AutoConfig.from_pretrained(tmp_path)


def test_grids_of_operators_that_are_not_used(tmp_path):
    TnnConfig(max_position_embeddings=2**22).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).fd_resolution == 2**23
    TnnConfig(max_position_embeddings=2**18, tno_type="fd", max_kernel_length=5).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).max_kernel_length is None


def test_an_embedding_that_is_missing(tmp_path):
    """A vocabulary that no weight has."""
    model = seeded(TnnForCausalLM, tiny_config("rpe"))
    model.save_pretrained(tmp_path)
    weights = {name: value for name, value in model.state_dict().items() if "layers" in name}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 2**24}))
    with pytest.raises(ValueError, match="declares more than the checkpoint holds: .* embed_tokens"):
        TnnForCausalLM.from_pretrained(tmp_path)


def test_a_size_that_is_changed_on_purpose(folder):
    """transformers' own way to load what fits."""
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 120
    loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
    assert loaded.lm_head.out_features == 120
    deeper = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=3)
    assert len(deeper.model.layers) == 3


@pytest.mark.parametrize("field", ["auto_map", "architectures"])
def test_references_to_code_are_not_followed(field, folder, tmp_path):
    """Where the package is installed, `auto_map` and `architectures` decide nothing."""
    config = json.loads((folder / "config.json").read_text())
    config[field] = {"AutoModelForCausalLM": "evil--../../x.Evil"} if field == "auto_map" else ["../../Evil"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is TnnForCausalLM


@pytest.mark.parametrize("load", [AutoModelForCausalLM, TnnForCausalLM, TnnModel], ids=lambda load: load.__name__)
def test_pickles_are_not_read(load, folder, tmp_path):
    """Neither a malicious one nor one of tensors, unless it is asked for; then only tensors are."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    victim = tmp_path / "executed"
    torch.save({"weights": Malicious(victim)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="model.safetensors"):
        load.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="[Ww]eights.only|WeightsUnpickler"):
        load.from_pretrained(tmp_path, use_safetensors=False)
    assert not victim.exists()
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    for unset in ({}, {"use_safetensors": None}):  # None is the default of transformers
        with pytest.raises(OSError, match="model.safetensors"):
            load.from_pretrained(tmp_path, **unset)
    assert load.from_pretrained(tmp_path, use_safetensors=False).config.tno_type == "rpe"


@pytest.mark.parametrize("value", [{"a": [1]}, [None], "text", 2**70, -1.5], ids=repr)
def test_wrong_types_of_every_field(value):
    """A configuration is refused with the name of the field, or the value is one that the field may have."""
    for field in dataclasses.fields(TnnConfig):
        if field.name not in TnnConfig.__annotations__ or field.name == "max_kernel_length":
            continue  # what all configurations of transformers have, and what no file sets
        try:
            config = TnnConfig.from_dict(tiny_config().to_dict() | {field.name: value})
        except Exception as error:
            assert field.name in str(error), field.name
        else:
            assert getattr(config, field.name) == value
            assert field.name in HARMLESS[type(value)], field.name


# Fields that may have values of these types, and what is made of them is no size (with RTF, a divisor of one).
HARMLESS = {
    dict: set(),
    list: set(),
    str: {"converted_from", "tno_class"},
    int: {"rpe_window", "bos_token_id", "pad_token_id", "eos_token_id", "rtf_num_denominators"},
    float: set(),
}


BROKEN = {
    "nested deeply": b'{"model_type": "tnn", "a": ' + b'{"a":' * 10**5 + b"1" + b"}" * (10**5 + 1),
    "a nested value": b'{"model_type": "tnn", "a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "no utf-8": b'{"model_type": "tnn", "a": "\xff\xfe"}',
    "a number of 5,000 digits": b'{"model_type": "tnn", "hidden_size": ' + b"9" * 5000 + b"}",
    "cut off": b'{"model_type": "tnn", "hidden_size"',
    "empty": b"",
    "a list": b"[]",
    "a number": b"3",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_configuration(content, folder, tmp_path):
    """An error, at once and without much memory, whatever transformers calls it."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(content)
    before = peak_megabytes()
    with pytest.raises((ValueError, OSError, RecursionError, TypeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert peak_megabytes() - before < 100


def test_foreign_code_is_not_run_even_if_allowed(folder, tmp_path):
    """Where the package is installed, `trust_remote_code` does not make files of the folder go before it."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
        assert type(loaded) is TnnForCausalLM
    assert not (tmp_path / "executed").exists()
