"""What comes with a checkpoint is not trusted: a tampered configuration, a pickle instead of weights."""

import ast
import json
import resource
from pathlib import Path

import pytest
import torch
from conftest import seeded, tiny_config
from safetensors.torch import load_file
from test_convert_original import Malicious
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_tnn import TnnForCausalLM, TnnModel

ROOT = Path(__file__).parent.parent
TAMPERED = [
    # Huge sizes.
    ("vocab_size", 10**12, "at most"),
    ("hidden_size", 2**40, "at most"),
    ("num_hidden_layers", 10**9, "at most 1,024"),
    ("glu_dim", 10**12, "at most"),
    ("gtu_expansion", 1e12, "at most"),
    ("gtu_expansion", float("inf"), "at most"),
    ("rpe_dim", 10**10, "at most"),
    ("rpe_layers", 10**8, "at most 128"),
    ("max_position_embeddings", 10**15, "at most"),
    ("fd_resolution", 2**50, "at most"),
    ("ski_rank", 10**12, "at most"),
    ("rtf_state_size", 10**12, "at most"),
    ("num_modes", 10**12, "at most"),
    ("num_labels", 10**12, "at most"),
    # No sizes, no numbers.
    ("hidden_size", -1, "at least 1"),
    ("fd_resolution", -4, "at least 1"),
    ("decay", float("nan"), "in (0, 1]"),
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
    ("product", "file:///evil", "one of 'chunked'"),
    ("dtype", "os.system", "the name of a dtype"),
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
        ("vocab_size", 10**7, r"embed_tokens.weight \(10000000, 32\) instead of \(99, 32\)"),
        ("glu_dim", 10**7, r"gate_proj.weight \(10000000, 32\) instead of"),
        ("rpe_dim", 10**7, r"in_proj.weight \(10000000, 1\) instead of"),
        ("num_hidden_layers", 99, "declares more than the checkpoint holds: .* layers.2."),
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
    with pytest.raises(OSError, match="model.safetensors"):
        load.from_pretrained(tmp_path)
    assert load.from_pretrained(tmp_path, use_safetensors=False).config.tno_type == "rpe"


def test_no_code_of_ours_reads_a_pickle():
    """`torch.load` only with `weights_only=True`; no other reader of pickles is called."""
    for path in [*ROOT.glob("modeling_tnn/*.py"), *ROOT.glob("scripts/*.py")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name == "torch.load":
                safe = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}.get("weights_only")
                assert safe == "True", path
            assert name not in ("pickle.load", "pickle.loads", "joblib.load", "eval", "exec"), path
            assert not any(keyword.arg == "allow_pickle" for keyword in call.keywords), path
