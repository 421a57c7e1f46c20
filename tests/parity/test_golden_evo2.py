"""Evo 2 (StripedHyena 2) against the released implementation, and the files that its checkpoints come in."""

import io
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import processes
from helpers.evo2 import PRESETS, TINY, logits, released, shapes
from helpers.hub_server import WITHOUT_THE_PACKAGE
from helpers.models import relative_error
from helpers.parity import FOLDER
from helpers.scripts import Malicious, read, run_script
from modeling_tnn import load_preset
from tnn_programs.original import evo2
from tnn_programs.original.conversion import convert, read_checkpoint, rename

SETS = sorted((FOLDER / "evo2").glob("*.json"))


@pytest.mark.parametrize("file", SETS, ids=lambda file: file.stem)
def test_golden(file, record_property):
    """Hidden states after each block and logits at each length, the long kernel, the loss, and its gradients."""
    options = json.loads(file.read_text())
    weights, expected = (load_file(file.with_suffix(f".{part}.safetensors")) for part in ("weights", "expected"))
    model, found, errors = convert(weights, options, "evo2")[0].double(), {}, {}
    for index, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *given, name=f"block_{index}": found.update({name: given[-1]}))
    for length in (1, 150, 20):
        ids = expected[f"{length}/input_ids"]
        output = model(ids, labels=ids, use_cache=False)
        stored = {name: expected.get(f"{length}/{name}") for name in found} | {"logits": expected[f"{length}/logits"]}
        found["logits"] = output.logits
        errors |= {
            f"{length} {name}": relative_error(found[name], one) for name, one in stored.items() if one is not None
        }
    kernel = model.model.layers[options["hcl_layer_idxs"][0]].mixer.tno.coefficients(64)
    errors["kernel"] = relative_error(kernel, expected["long_filter"])
    loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss - expected["20/loss"]) < 1e-9 and abs(output.loss - loss) < 2e-6  # transformers' is in float32
    loss.backward()
    # By the released names. Rows of `Wqkv` are in the order after loading.
    stored = {name.removeprefix("20/grad/"): one for name, one in expected.items() if "/grad/" in name}
    wanted, _ = rename(stored, evo2.NAMES)
    evo2.prepare(wanted, options | {"column_split": False})
    least = 1e-6 * max(one.abs().max().item() for one in wanted.values())
    for name, one in wanted.items():
        gradient = model.model.get_parameter(name).grad
        errors[name] = relative_error(gradient, one, scale=max(least, one.abs().max().item()))
    record_property("parity evo2 float64", max(errors.values()))
    assert max(errors.values()) < 1e-9 and len(errors) > 50
    assert relative_error(logits(weights, options, ids), expected["20/logits"]) < 1e-12  # the definition in helpers


VARIANTS = [
    {}, {"interleave": False}, {"column_split_hyena": True}, {"interleave": False, "column_split_hyena": True},
    {"hyena_flip_x1x2": True}, {"column_split": False}, {"use_interpolated_rotary_pos_emb": False},
    {"evo2_style_activations": False, "mlp_activation": "silu"}, {"attn_layer_idxs": [], "hcs_layer_idxs": [0, 3, 4]},
    {"hcl_layer_idxs": [0, 1], "hcm_layer_idxs": [2], "hcs_layer_idxs": [4], "eps": 0.1, "rotary_emb_base": 7.0},
]  # fmt: skip


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_options(change):
    """Against the definition, which does not permute weights."""
    torch.manual_seed(3)
    options = TINY | {"vocab_size": 16} | change
    weights, ids = released(options), torch.randint(16, (2, 140))
    model, report = convert(weights, options, "evo2")
    assert relative_error(model(ids, use_cache=False).logits, logits(weights, options, ids)) < 1e-11
    assert report["tensors"].keys() == weights.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    """They are the configuration of a converted checkpoint of these options and shapes."""
    weights = {tensor: torch.empty(shape, device="meta") for tensor, shape in shapes(PRESETS[name]).items()}
    config = convert(weights, *((TINY, "evo2") if name == "evo2-tiny" else ({}, name)))[0].config
    assert config == load_preset(name, architectures=None, ski_interpolation=config.ski_interpolation)


def write(folder: Path, form: str, weights: dict, **options) -> Path:
    """A checkpoint in a form in which it may come, with its options; the path to give to the program."""
    folder.mkdir()
    (folder / "options.yml").write_text(yaml.safe_dump(TINY | options))
    (folder / "config.json").write_text('{"model_type": "evo2"}')
    file = folder / "evo2_tiny.pt"
    torch.save(weights, file, _use_new_zipfile_serialization=form != "legacy")
    if form == "parts":
        content = file.read_bytes()
        file.unlink()
        for number in range(12):  # part10 comes after part9
            size = len(content) // 12 + 1
            Path(f"{file}.part{number}").write_bytes(content[number * size : (number + 1) * size])
    return folder if form in ("folder", "parts") else file


def run_conversion(given: Path, output: Path, *more) -> None:
    options = given.with_name("options.yml") if given.is_file() else given / "options.yml"
    run_script("convert_original", given, output, "--architecture", "evo2", "--hparams", options, *more)


LOAD = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.") and model.dtype == torch.bfloat16
torch.save(model.double()(torch.arange(30)[None]).logits, sys.argv[2])
"""


@pytest.mark.parametrize("form", ["file", "folder", "parts", "legacy"])
def test_program(form, tmp_path):
    """Bytes of an FP8 library are not read, whatever is in them. Poles stay in float32, in a half model too."""
    torch.manual_seed(5)
    weights, victim, ids = released(TINY, torch.bfloat16), tmp_path / "executed", torch.arange(30)[None]
    states = {"blocks.0.projections._extra_state": io.BytesIO(pickle.dumps(Malicious(victim)))}
    weights["blocks.1.projections._extra_state"] = torch.ones(9).byte()
    weights["blocks.0.mlp.l1.weight"] = weights["blocks.0.mlp.l1.weight"].t().contiguous().t()  # of any strides
    given, output = write(tmp_path / "released", form, weights | states), tmp_path / "converted"
    run_conversion(given, output, "--dtype bfloat16")
    assert not victim.exists() and not [*output.glob(".parts*")]
    assert read(output, "original")["tensors"].keys() == weights.keys()
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64)
    found = model(ids).logits
    assert relative_error(found, logits({name: one.double() for name, one in weights.items()}, TINY, ids)) < 1e-11
    half = AutoModelForCausalLM.from_pretrained(output)
    assert half.dtype == torch.bfloat16 and relative_error(half(ids).logits.double(), found) < 0.05
    for one in (half, half.to(torch.float16), AutoModelForCausalLM.from_pretrained(output).to(torch.bfloat16)):
        exact = {
            name.rpartition(".")[2]: value for name, value in one.named_parameters() if value.dtype == torch.float32
        }
        assert exact.keys() == {"log_poles", "residues"}
        assert torch.equal(exact["log_poles"], weights["blocks.2.filter.log_poles"][..., 0])
    if form == "parts":
        (given / "evo2_tiny.pt.part3").unlink()
        with pytest.raises(SystemExit, match=r"must be a file or have all parts, got no evo2_tiny.pt.part3"):
            run_conversion(given / "evo2_tiny.pt.part0", tmp_path / "other")
        assert not (tmp_path / "other").exists()
    if form == "file":  # saved again, and loaded where the package is not installed
        half.to(torch.bfloat16).save_pretrained(tmp_path / "again")
        program = [sys.executable, "-c", WITHOUT_THE_PACKAGE + LOAD, tmp_path / "again", tmp_path / "logits"]
        processes.run([*map(str, program)], env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")})
        assert torch.equal(torch.load(tmp_path / "logits"), half.double()(ids).logits)


def test_tokenizer(tmp_path):
    """A byte is its id. All 512 ids have a token, which a saved tokenizer has too; padding is on the left."""
    evo2.byte_tokenizer(1000).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sorted(tokenizer.get_vocab().values()) == [*range(512)] and tokenizer.model_max_length == 1000
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, None)
    text = "ACGTNacgt|d__Bacteria;\n\t  p__\u00e9\u6f22" + "".join(map(chr, range(2, 128)))
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    batch = tokenizer(["ACGT", "A"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[65, 67, 71, 84], [1, 1, 1, 65]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]


# The error, and what is changed of the weights or the options; None is left out.
D, H = "blocks.1.filter.D", "blocks.1.filter.h"
REFUSED = {
    "hidden_size must be given for a conversion": {"hidden_size": None},
    "layers must have one kind each": {"hcl_layer_idxs": [1]},
    "checkpoint must have 6 layers, as its options, got 5": {"hcs_layer_idxs": [0, 4, 5]},
    "hidden_size must be 64, as in the weights .* got 128": {"hidden_size": 128},
    "inner_mlp_size must be 176, as in the weights .* got 192": {"inner_mlp_size": 192},
    "state_size must be 16, as in the weights .* got 8": {"state_size": 8},
    "hcm_filter_groups must be 8, as in the weights .* got 16": {"hcm_filter_groups": 16},
    "hcs_filter_length must be 128, as in": {"hcm_layer_idxs": [0], "hcs_layer_idxs": [1, 4]},
    "must hold blocks.2.filter.h .option hcm_layer_idxs": {"hcm_layer_idxs": [2], "hcl_layer_idxs": [1]},
    "qkv_proj_bias must be False for a conversion, got True": {"qkv_proj_bias": True},
    "Missing .*layers.1.mixer.skip.weight": {D: None},
    "must hold blocks.1.filter.h ": {H: None},
    "Missing .*layers.3.attention.q_proj.weight": {"blocks.3.inner_mha_cls.Wqkv.weight": None},
    "a whole model, got no embed_tokens.weight": {"embedding_layer.weight": None},
    "Unexpected .*blocks.0.filter.D": {"blocks.0.filter.D": torch.ones(64)},
    "size mismatch for blocks.1.filter.D": {D: torch.ones(32)},
    "in_proj.weight must have 3 . hidden_size=192 rows": {"blocks.0.projections.weight": torch.ones(256, 64)},
    "floating-point numbers, got torch.int64 for blocks.1.filter.D": {D: torch.ones(64).long()},
    "floating-point numbers, got torch.float8_e4m3fn for": {D: torch.ones(64).to(torch.float8_e4m3fn)},
}


def test_what_does_not_fit():
    for message, changes in REFUSED.items():
        given = {name: one for name, one in (released(TINY) | TINY | changes).items() if one is not None}
        weights = {name: given.pop(name) for name in [*given] if "." in name}
        weights |= {name: given.pop(name) for name in ("embedding_layer.weight",) if name in given}
        with pytest.raises(ValueError, match=message):
            convert(weights, given, "evo2")


def test_fp8_is_allowed_by_name(tmp_path):
    given = write(tmp_path / "released", "file", released(TINY), use_fp8_input_projections=True)
    with pytest.raises(SystemExit, match="must be off .* models of 1, 20 and 40 billion .* option allow_fp8"):
        run_conversion(given, tmp_path / "out")
    run_conversion(given, tmp_path / "out", "--allow_fp8")
    with pytest.raises(SystemExit, match="hidden_size must be 64, as in the weights of the checkpoint, got 4096"):
        run_script("convert_original", given, tmp_path / "other", "--architecture", "evo2-7b-1m")


def test_hostile_files(tmp_path):
    """End in one line. Nothing in them is run, and nothing is written."""
    victim, output, weights, state = tmp_path / "executed", tmp_path / "out", released(TINY), io.BytesIO()
    given = write(tmp_path / "released", "file", weights)
    content, options = given.read_bytes(), given.with_name("options.yml")
    state.__setstate__((b"", 0, {"name": Malicious(victim)}))
    for evil in (Malicious(victim), state, {"recipe": Malicious(victim)}):
        for zipped in (True, False):
            torch.save(weights | {"a._extra_state": evil}, given, _use_new_zipfile_serialization=zipped)
            with pytest.raises(SystemExit, match="would run code"):
                run_conversion(given, output)
    for cut in (content[: len(content) // 2], content[:-1], b"", content[5000:]):
        given.write_bytes(cut)
        with pytest.raises(SystemExit, match="evo2_tiny.pt is refused: it is damaged"):
            run_conversion(given, output)
    torch.save({"backbone.layers.0.mixer.in_proj.weight": torch.ones(3, 1), "lm_head.weight": torch.ones(1)}, given)
    with pytest.raises(SystemExit, match="a whole model, got no embed_tokens.weight"):
        run_conversion(given, output)
    for empty in (torch.ones(1, 1).expand(2**24, 64), torch.ones(512, 64, device="meta"), torch.eye(512).to_sparse()):
        torch.save(weights | {"embedding_layer.weight": empty}, given)
        with pytest.raises(SystemExit, match="must hold all numbers of a tensor|got what cannot be read"):
            run_conversion(given, output)
    given.with_name("other.pt").touch()
    with pytest.raises(SystemExit, match="must hold config.json and one of .* with evo2_tiny.pt, other.pt"):
        run_conversion(given.parent, output)
    given.write_bytes(content)
    bomb = "a: &a [1, 2]\nb: [*a, *a]"
    for text in (bomb, "- 1", "a: !!python/object/apply:os.system [ls]", "a: [", "[" * 10**4, "a: \x00"):
        options.write_text(text)
        with pytest.raises(SystemExit, match="--hparams must be a JSON object or a YAML mapping, got .*options.yml"):
            run_conversion(given, output)
    assert not victim.exists() and not output.exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from Linux")
def test_a_checkpoint_is_not_in_memory(tmp_path):
    """A file is mapped: its tensors are read when they are used, and no copy of them is kept."""

    def memory() -> int:
        return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

    torch.save({"a": torch.ones(2**25)}, tmp_path / "a.pt")
    before = memory()
    tensors, _ = read_checkpoint(tmp_path / "a.pt")
    assert tensors["a"].sum() == 2**25 and memory() - before < 2**25  # of 2**27
