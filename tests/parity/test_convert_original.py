"""Conversion of released checkpoints: whole models against the outputs of the released code, and what is refused."""

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from helpers.models import relative_error
from helpers.parity import CASES, Case, named_cases
from helpers.scripts import Malicious, run, run_script
from tnn_programs.original.conversion import convert, read_checkpoint

LANGUAGE_MODELS = named_cases("causal_lm") + named_cases("masked_lm")
TOLERANCE = 2e-5


def official_tensors(case: Case) -> dict[str, torch.Tensor]:
    """The state dict of the released model."""
    version = "decoder.version" if case.name.startswith("lm/") else "encoder.sentence_encoder.version"
    bookkeeping = {version: torch.tensor([3.0])} if "arch" in case.hparams else {}
    return bookkeeping | {
        key.removeprefix("param/"): value for key, value in case.tensors.items() if key.startswith("param/")
    }


def official_options(case: Case) -> dict:
    """The options of a case, for the length of its run."""
    return case.hparams | {"tokens_per_sample": case.run["n"]}


def write_files(case: Case, folder: Path) -> list[str]:
    """A checkpoint and its options; the arguments of the script that converts them to `folder/converted`."""
    save_file(official_tensors(case), folder / "model.safetensors")
    (folder / "hparams.json").write_text(json.dumps(official_options(case)))
    return [str(folder / "model.safetensors"), str(folder / "converted"), "--architecture", case.hparams["arch"],
            "--hparams", str(folder / "hparams.json")]  # fmt: skip


@pytest.mark.parametrize("name, tag", LANGUAGE_MODELS)
def test_language_models(name, tag, tmp_path, record_property):
    """Logits of the converted model, or what the case stores of them.

    Bidirectional rows with padding differ on purpose; see `test_padding_differs_on_purpose`.
    """
    case = Case(name, tag, torch.float32)
    run_script("convert_original", *write_files(case, tmp_path))
    auto = AutoModelForMaskedLM if name.startswith("mlm") else AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "converted")
    causal = model.config.causal
    inputs = {"input_ids": case.ids()} | ({} if causal else {"attention_mask": case.ids("attention_mask")})
    rows = slice(1) if case.run["padded"] and not causal else slice(None)
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
    stored = {
        "logits": outputs.logits,
        "logits_last32": outputs.logits[:, -32:],
        "features": outputs.hidden_states[-1],
    }
    key = next(key for key in stored if case.get(f"out64/{key}") is not None)
    error = relative_error(stored[key][rows], case.output(key)[rows])
    record_property("parity converted checkpoints float32", error)
    assert error < TOLERANCE


@pytest.mark.parametrize("name, tag", [c for c in named_cases("masked_lm") if c[0] == "mlm/decay_postnorm"])
def test_classification_head(name, tag, tmp_path):
    case = Case(name, tag, torch.float32)
    run_script("convert_original", *write_files(case, tmp_path), "--head", "sequence-classification")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "converted")
    with torch.no_grad():
        logits = model(case.ids(), attention_mask=case.ids("attention_mask")).logits
    assert relative_error(logits, case.output("cls_logits")) < TOLERANCE


def test_every_tensor_is_accounted_for(tmp_path):
    """In the report of the script."""
    case = Case("mlm/decay_postnorm", "n17")
    shown = run("convert_original", *write_files(case, tmp_path)).stdout
    assert "TnnForMaskedLM" in shown and "left out" in shown
    report = json.loads((tmp_path / "converted" / "original.json").read_text())
    assert report["tensors"].keys() == official_tensors(case).keys()
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    converted = {name for name in report["tensors"].values() if not name.startswith("left out")}
    assert converted == set(weights)
    reasons = {official: why for official, why in report["tensors"].items() if why.startswith("left out")}
    assert {official.split(".")[0] for official in reasons} == {"encoder", "classification_heads"}
    assert "version" in reasons["encoder.sentence_encoder.version"]
    assert all("decay" in why for official, why in reasons.items() if official.endswith("gamma"))


def fairseq_checkpoint(case: Case, **changes) -> dict:
    """A checkpoint as fairseq saves it: options in a Namespace, and the state of its training."""
    model = official_tensors(case) | {"decoder.output_projection.weight": case.tensors[
        "param/decoder.embed_tokens.weight"]}  # fmt: skip
    options = argparse.Namespace(**official_options(case), data="/data", lr=[0.0005], criterion="cross_entropy")
    return {
        "args": None,
        "cfg": {"model": options, "task": {"_name": "language_modeling", "tokens_per_sample": 512}},
        "model": model,
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 3}, "val_loss": 3.5},
        "last_optimizer_state": {"state": {0: {"step": 7, "exp_avg": torch.zeros(3)}}},
    } | changes


@pytest.mark.parametrize("where", ["cfg", "args"])
def test_fairseq_file(where, tmp_path):
    """Options come from the file itself; the tied projection is recognised as a copy."""
    case = Case("lm/decay_prenorm", "n17", torch.float32)
    changes = {} if where == "cfg" else {"cfg": None, "args": argparse.Namespace(**official_options(case))}
    torch.save(fairseq_checkpoint(case, **changes), tmp_path / "checkpoint_best.pt")
    arguments = [tmp_path / "checkpoint_best.pt", tmp_path / "converted", "--architecture", "tnn_v2_decay_99_pre"]
    run_script("convert_original", *arguments)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert model.config.max_position_embeddings == 17 and model.config.tie_word_embeddings
    with torch.no_grad():
        assert relative_error(model(case.ids()).logits, case.output("logits")) < TOLERANCE


def test_unsafe_pickle_is_refused(tmp_path):
    victim = tmp_path / "executed"
    torch.save({"model": {"weight": torch.zeros(2)}, "extra": Malicious(victim)}, tmp_path / "evil.pt")
    with pytest.raises(SystemExit, match="is refused.*would run code"):
        run_script("convert_original", tmp_path / "evil.pt", tmp_path / "out", "--architecture", "tnn_v2_decay_99_pre")
    assert not victim.exists() and not (tmp_path / "out" / "config.json").exists()


def test_other_files_are_refused(tmp_path):
    for name in ("model.onnx", "model.safetensors", "model.pt", "folder"):
        (tmp_path / name).write_bytes(b"this is no checkpoint")
        with pytest.raises(ValueError, match=name):
            read_checkpoint(tmp_path / name)
    for content in ([torch.zeros(2)], torch.zeros(2), {"model": [1]}):
        torch.save(content, tmp_path / "list.pt")
        with pytest.raises(ValueError, match="must hold the tensors of a model by their names"):
            read_checkpoint(tmp_path / "list.pt")
    torch.save({"model": {}, "args": [1], "cfg": [1]}, tmp_path / "list.pt")
    assert read_checkpoint(tmp_path / "list.pt") == ({}, {})


EMBEDDING, WEIGHT = "decoder.embed_tokens.weight", torch.ones(8, 4)
STRANGE = [{EMBEDDING: torch.tensor(1.0)}, {EMBEDDING: WEIGHT[0]}, {1: WEIGHT}, {None: WEIGHT, EMBEDDING: WEIGHT}]
OPTIONS = ("[]", "3", '{"tokens_per_sample": "x"}', '{"norm_type": {}}', '{"a":' * 10**5, '{"num_heads": "x"}', "\xff")


def test_contents_of_any_kind_end_in_one_line(tmp_path):
    """Names, shapes, options, and the configuration of a folder."""
    given = {"decoder.layers.0.self_attn.gtu.u_proj.weight": WEIGHT, EMBEDDING: WEIGHT}
    file, options, folder = tmp_path / "a.pt", tmp_path / "options.json", tmp_path / "folder"
    folder.mkdir()
    save_file({"backbone.embeddings.word_embeddings.weight": WEIGHT}, folder / "model.safetensors")
    lines = [(tensors, "{}", "tnn_v2_decay_99_pre") for tensors in STRANGE]
    lines += [(given, text, name) for text in OPTIONS for name in ("tnn_v2_decay_99_pre", "tnn_pytorch")]
    for tensors, text, name in lines:
        torch.save({"model": tensors}, file)
        options.write_bytes(text.encode("latin-1"))
        with pytest.raises(SystemExit, match="^error: .*(a.pt and its options must be|hparams|must|does not fit)"):
            run_script("convert_original", file, tmp_path / "out", "--architecture", name, "--hparams", options)
    for text in ("null", "[]", "3", '{"layer": 3}', '{"layer": null}', '{"layer":' * 10**5):
        (folder / "config.json").write_text(text)
        with pytest.raises(SystemExit, match="^error: .*folder"):
            run_script("convert_original", folder, tmp_path / "out", "--architecture", "hyenadna")


def first(name: str) -> tuple[dict, dict, str]:
    """Tensors, options and architecture of the first run of a case."""
    case = Case(name, CASES[name]["runs"][0]["tag"])
    return official_tensors(case), official_options(case), case.hparams["arch"]


GAMMA = "decoder.layers.{}.self_attn.gtu.toep.gamma"
REFUSED = {
    "par_type must be .* for a conversion, got 2": {"par_type": 2},
    "glu_act must be act_fun='silu' .*, got 'relu'": {"glu_act": "relu"},
    "tno_type must be one of tno, tno_fd.* got 'llftno'": {"tno_type": "llftno"},
    "`norm_type` must be one of .*, got 'groupnorm'": {"norm_type": "groupnorm"},
    "Unexpected .*decoder.layer_norm.weight": {"decoder_normalize_before": False},
    "Unexpected .*decoder.layers.0.extra.weight": {"decoder.layers.0.extra.weight": torch.zeros(2)},
    "must have different names after the conversion, got norm.bias": {"model.norm.bias": torch.zeros(32)},
    "gamma must be one decay": {GAMMA.format(1): torch.full((1, 1, 96), 0.5)},
    "must hold the decay, `gamma`, .* got none for the layers 1": {GAMMA.format(1): None},
    "Missing .*layers.0.mixer.tno.decay_logit": {"use_multi_decay": True, GAMMA.format(0): None},
    "a whole model, got no embed_tokens.weight": {"decoder.embed_tokens.weight": None},
}


def test_what_does_not_fit_is_refused():
    for message, changes in REFUSED.items():
        tensors, options, architecture = first("lm/decay_prenorm")
        for name, value in changes.items():
            (tensors if "." in name else options)[name] = value
        given = {name: value for name, value in tensors.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            convert(given, options, architecture)
    tensors, options, architecture = first("lm/decay_prenorm")
    tensors["decoder.layer_norm.weight"] = tensors["decoder.layer_norm.weight"].long()
    with pytest.raises(ValueError, match="floating-point numbers, got torch.int64 for decoder.layer_norm.weight"):
        convert(tensors, options, architecture)
    with pytest.raises(ValueError, match="must hold layers of a TNN"):
        convert({"embed_tokens.weight": torch.zeros(5, 4)}, {}, "tnn_v2_decay_99_pre")


def test_learned_decays_are_parameters():
    tensors, options, architecture = first("lm/decay_prenorm")
    for layer in range(3):
        tensors[f"decoder.layers.{layer}.self_attn.gtu.toep.gamma"] = torch.randn(1, 1, 96)
    model, report = convert(tensors, options | {"use_multi_decay": True}, architecture)
    assert model.config.learnable_decay and model.config.decay == 0.99
    official = tensors["decoder.layers.1.self_attn.gtu.toep.gamma"].flatten()
    assert torch.equal(model.model.layers[1].mixer.tno.decay_logit, official)
    assert report["tensors"]["decoder.layers.1.self_attn.gtu.toep.gamma"] == "model.layers.1.mixer.tno.decay_logit"


def test_half_precision_stays():
    tensors, options, architecture = first("lm/decay_prenorm")
    model, _ = convert({name: value.half() for name, value in tensors.items()}, options, architecture)
    assert model.dtype == torch.float16
    assert model.config.decay == torch.tensor(0.99).half().item()


RELEASED_LAYERS = [c for c in named_cases("block") if "tnnpytorch" in c[0]]


@pytest.mark.parametrize("name, tag", RELEASED_LAYERS)
@pytest.mark.parametrize("prefix", ["", "layers.0."])
def test_layers_of_tnn_pytorch(name, tag, prefix):
    """One layer between embeddings that hold its input, and, with pre-normalisation, a final norm."""
    case = Case(name, tag, torch.float32)
    x = case.input("x")
    tensors = {prefix + name: value for name, value in official_tensors(case).items()}
    tensors["embed_tokens.weight"] = x.flatten(0, 1)
    norm = torch.nn.Identity()
    if case.hparams["prenorm"]:
        norm = torch.nn.LayerNorm(x.shape[-1])
        tensors |= {f"norm.{name}": value.data for name, value in norm.named_parameters()}
    model, report = convert(tensors, case.hparams, "tnn_pytorch")
    with torch.no_grad():
        hidden = model(torch.arange(len(tensors["embed_tokens.weight"])).view(x.shape[:2])).last_hidden_state
        assert relative_error(hidden, norm(case.output().float())) < TOLERANCE
    assert not any(why.endswith("(option head)") for why in report["tensors"].values())


@pytest.mark.parametrize(("published", "kind", "warning"), [
    (False, "released", r"they spread over \d+ tokens, for which outputs agree"),
    (True, "linear", "interpolates as published: outputs differ"),
])  # fmt: skip
def test_interpolation_of_ski(published, kind, warning):
    if "mlm/ski_postnorm" not in CASES:
        pytest.skip("not in this part of the golden vectors")
    tensors, options, architecture = first("mlm/ski_postnorm")
    model, report = convert(tensors, options, architecture, published_ski=published)
    assert model.config.ski_interpolation == kind
    assert re.search(warning, report["warnings"][0])
