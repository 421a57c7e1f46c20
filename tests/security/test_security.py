"""Untrusted checkpoints and tokenizers: tampered configurations, pickles, foreign code; and calls no source file has.

Ruff's rules S (flake8-bandit) check most of the last in `make lint`; here is what they do not know.
"""

import ast
import contextlib
import dataclasses
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import logging as transformers_logging

from helpers.models import seeded, slow, tiny_config
from helpers.scripts import ROOT, Malicious, run, run_script, save_model, write_config, write_text
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, TnnModel
from tnn_programs.cli.model_path import check_vocabulary
from tnn_programs.cli.runs import write_checksums

# Of each kind; `test_wrong_types_of_every_field` has all fields.
TAMPERED = [
    # Huge sizes, and no sizes or numbers.
    ("num_hidden_layers", 10**9, "in [1, 1,024]"),
    ("gtu_expansion", float("inf"), "in [1, 16,777,216]"),
    ("fd_resolution", 2**50, "a power of two in [1, 33,554,432]"),
    ("num_labels", 10**12, "at most"),
    ("layer_norm_eps", float("nan"), "above 0"),
    # Wrong types.
    ("hidden_size", True, "expected int, got bool"),
    ("causal", 1, "expected bool, got int"),
    # Unknown variants and texts that look like paths or code.
    ("tno_type", "../../modeling_evil", "one of 'rpe'"),
    ("hidden_act", "os.system", "one of 'gelu'"),
    ("dtype", "os.system", "field of a wrong kind"),
]


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def change(folder: Path, **fields):
    """Change fields of the saved configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@contextlib.contextmanager
def within(megabytes: int):
    """What runs takes less than so much memory."""
    before = peak_megabytes()
    yield
    assert peak_megabytes() - before < megabytes


def test_tampered_configuration(folder):
    """Refused with the name of the field, the value and what is allowed, before memory is spent."""
    original = (folder / "config.json").read_text()
    for field, value, message in TAMPERED:
        (folder / "config.json").write_text(original)
        change(folder, **{field: value})
        with within(100), pytest.raises(Exception) as error:
            AutoModelForCausalLM.from_pretrained(folder)
        assert message in str(error.value) and (field in str(error.value) or field == "dtype"), (field, value)


SIZES = [
    ("vocab_size", 10**7, r"embed_tokens.weight must be \(99, 32\), got \(10000000, 32\)"),
    ("intermediate_size", 10**7, r"gate_proj.weight must be .*, got \(10000000, 32\)"),
    ("rpe_dim", 10**7, r"in_proj.weight must be .*, got \(10000000, 1\)"),
    ("num_hidden_layers", 99, "declares more than the checkpoint holds: .* layers.2."),
    ("num_hidden_layers", 1000, "declares more than the checkpoint holds: 1000 layers instead of 2"),
]


@pytest.mark.parametrize("size", ["5GB", *slow("40KB")], ids=["one file", "shards"])
def test_sizes_that_are_not_those_of_the_weights(size, saved, tmp_path):
    """Within the limits, but more than the files hold: refused before it is allocated."""
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "40KB")
    original = (tmp_path / "config.json").read_text()
    for field, value, message in SIZES:
        (tmp_path / "config.json").write_text(original)
        change(tmp_path, **{field: value})
        for load in (AutoModelForCausalLM, TnnModel, AutoModelForSequenceClassification):
            with within(200), pytest.raises(ValueError, match=message):
                load.from_pretrained(tmp_path)


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
    change(tmp_path, **fields)
    for load in (AutoConfig, head, TnnModel):
        with pytest.raises(ValueError, match=f"`{name}` must be at most .*max_kernel_length must be given to from_p"):
            load.from_pretrained(tmp_path)
    assert run("plan", "--config_name", tmp_path, "--lengths", 16, check=False).returncode == 2
    assert getattr(AutoConfig.from_pretrained(tmp_path, max_kernel_length=2**25), name) >= 2**20
    assert getattr(AutoConfig.from_pretrained(tmp_path, **{name: 2**21}), name) == 2**21  # asked for by the caller
    change(tmp_path, max_kernel_length=2**30)
    with pytest.raises(ValueError, match=f"`{name}` must be at most"):
        AutoConfig.from_pretrained(tmp_path)


def test_grids_of_operators_that_are_not_used(tmp_path):
    TnnConfig(max_position_embeddings=2**22).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).fd_resolution == 2**22
    TnnConfig(max_position_embeddings=2**18, tno_type="fd", max_kernel_length=5).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).max_kernel_length is None


def test_an_embedding_that_is_missing(folder):
    """A vocabulary that no weight has."""
    file = folder / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if "layers" in name}, file, {"format": "pt"})
    change(folder, vocab_size=2**24)
    with pytest.raises(ValueError, match="declares more than the checkpoint holds: .* embed_tokens"):
        TnnForCausalLM.from_pretrained(folder)


def test_foreign_code_is_not_run(folder, tmp_path):
    """Where the package is installed, `auto_map` and `architectures` decide nothing, even if code is trusted."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    for fields in (
        {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
        {"auto_map": {"AutoModelForCausalLM": "evil--../../x.Evil"}, "architectures": ["../../Evil"]},
    ):
        change(folder, **fields)
        for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
            assert type(AutoModelForCausalLM.from_pretrained(folder, **options)) is TnnForCausalLM
    assert not (tmp_path / "executed").exists()


def test_pickles_are_not_read(folder, tmp_path):
    """Neither a malicious one nor one of tensors, unless it is asked for; then only tensors are."""
    weights, victim = load_file(folder / "model.safetensors"), tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    for load in (AutoModelForCausalLM, TnnForCausalLM, TnnModel):
        torch.save({"weights": Malicious(victim)}, folder / "pytorch_model.bin")
        with pytest.raises(Exception, match="[Ww]eights.only|WeightsUnpickler"):
            load.from_pretrained(folder, use_safetensors=False)
        assert not victim.exists()
        torch.save(weights, folder / "pytorch_model.bin")
        for unset in ({}, {"use_safetensors": None}):  # None is the default of transformers
            with pytest.raises(OSError, match="model.safetensors"):
                load.from_pretrained(folder, **unset)
        assert load.from_pretrained(folder, use_safetensors=False).config.tno_type == "rpe"


# Fields that may have values of these types, and what is made of them is no size (with RTF, a divisor of one).
HARMLESS = {
    str: {"converted_from", "tno_class"},
    int: {"rpe_window", "bos_token_id", "pad_token_id", "eos_token_id", "rtf_num_denominators"},
}


def test_wrong_types_of_every_field():
    """A configuration is refused with the name of the field, or the value is one that the field may have."""
    fields = tiny_config().to_dict()
    for field in (field.name for field in dataclasses.fields(TnnConfig)):
        if field not in TnnConfig.__annotations__ or field == "max_kernel_length":
            continue  # what all configurations of transformers have, and what no file sets
        for value in ({"a": [1]}, [None], "text", 2**70, -1.5, float("nan"), float("inf")):
            try:
                config = TnnConfig.from_dict(fields | {field: value})
            except Exception as error:
                assert field in str(error), field
            else:
                assert getattr(config, field) == value and field in HARMLESS.get(type(value), ()), field


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


def test_broken_configuration(folder):
    """An error, at once and without much memory, whatever transformers calls it."""
    for content in BROKEN.values():
        (folder / "config.json").write_bytes(content)
        with within(100), pytest.raises((ValueError, OSError, RecursionError, TypeError)):
            AutoModelForCausalLM.from_pretrained(folder)


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


@pytest.fixture
def tokenized(tmp_path) -> Path:
    """A causal model with its tokenizer."""
    return save_model(tmp_path / "model", tno_type="rpe", decay=0.9)


def edit(file: Path, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


EVIL = [
    {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
    {"auto_map": {"AutoTokenizer": ["user/evil--evil.Evil", None]}},
    {"tokenizer_class": "evil.Evil"},
    {"tokenizer_class": "../../evil"},
]


@pytest.mark.parametrize("fields", EVIL, ids=lambda fields: str(list(fields.values())[0]))
def test_code_of_tokenizers_is_not_run(fields, tokenized, tmp_path):
    """Nor is what a template asks for: it runs in a sandbox."""
    (tokenized / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    edit(tokenized / "tokenizer_config.json", lambda content: content.update(fields, chat_template=template))
    transformers_logging.set_verbosity_error()
    for options in ({}, {"trust_remote_code": False}):
        loaded = AutoTokenizer.from_pretrained(tokenized, **options)
        assert type(loaded).__module__.startswith("transformers.") and loaded("The fox")["input_ids"]
    transformers_logging.set_verbosity_warning()
    with pytest.raises(Exception, match="unsafe"):
        loaded.apply_chat_template([{"role": "user", "content": "x"}])
    assert not (tmp_path / "executed").exists()


def test_ids_without_embedding(tokenized):
    """The scripts say so before they begin; the model itself, when it sees one. The ids count and not their number."""
    tokenizer = AutoTokenizer.from_pretrained(tokenized)
    size = len(tokenizer)
    check_vocabulary(tokenizer, size)
    message = f"below vocab_size={size - 1} of the model, got {size - 1} for .* has {size} tokens"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(tokenizer, size - 1)
    edit(tokenized / "tokenizer.json", lambda content: content["model"]["vocab"].update(a=10**7))
    text, output = write_text(tokenized.parent / "text.txt"), ["--output_dir", tokenized.parent / "out"]
    config, model = write_config(tokenized.parent / "config", vocab_size=300), ["--model_name_or_path", tokenized]
    for command in (
        ["pretrain", "--config_name", config, "--train_file", text, "--tokenizer_name", tokenized, *output],
        ["evaluate_lm", *model, "--validation_file", text, *output],
        ["to_recurrent", *model, *output],
        ["generate", *model, "--prompt", "a fox"],
    ):
        with pytest.raises(SystemExit, match="must be below vocab_size=.*, got 10000000 for 'a'"):
            run_script(*command)
    tokenizer, model = AutoTokenizer.from_pretrained(tokenized), AutoModelForCausalLM.from_pretrained(tokenized)
    with pytest.raises(ValueError, match="got 10000000 for"):
        check_vocabulary(tokenizer, size + 1)
    with pytest.raises(ValueError, match=r"Entries of `input_ids` must be in \[0, vocab_size=.*, got 10000000"):
        model(**tokenizer("a", return_tensors="pt", return_token_type_ids=False))
