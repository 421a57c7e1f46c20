"""HyenaDNA against the released implementation: hidden states, filters and gradients of the converted model."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from helpers import processes
from helpers.hub_server import WITHOUT_THE_PACKAGE, HubServer, Repo, client, environment
from helpers.models import relative_error, slow
from helpers.parity import Case, named_cases, over
from helpers.scripts import ROOT, run_script
from tnn_programs.original import conversion
from tnn_programs.original.conversion import convert
from tnn_programs.original.hyenadna import layout


def released_state(case: Case) -> dict[str, torch.Tensor]:
    return {key.removeprefix("param/"): one for key, one in case.tensors.items() if key.startswith("param/")}


@over(named_cases("hyenadna"))
def test_model(case: Case):
    model, report = convert(released_state(case), case.hparams | case.hparams["layer"], "hyenadna")
    model = model.to(case.dtype)
    states = model.model(case.ids("ids")).last_hidden_state
    case.check(states, case.output())
    operator = model.model.layers[0].mixer.tno
    taps = operator.coefficients(states.shape[1]).t()  # (L, d)
    taps = torch.cat([taps[:1] - operator.direct, taps[1:]])
    case.check(taps, case.output("filter_of_layer_0"))
    if case.dtype == torch.float64:
        (states * case.get("in/w")).sum().backward()
        check_gradients(case, dict(model.named_parameters()), report["tensors"])


def check_gradients(case: Case, parameters: dict, names: dict[str, str]):
    """Of the filters, long and short. Those that are a millionth of the largest relative to that, see `Case`."""
    start = f"{case.tag}/grad64/param/"
    stored = {key.removeprefix(start): one for key, one in case.tensors.items() if key.startswith(start)}
    largest = max(one.abs().max().item() for one in stored.values())
    for official, expected in stored.items():
        scale = max(1e-6 * largest, expected.abs().max().item())
        case.check(parameters[names[official]].grad, layout(names[official], expected), scale=scale)


HF_OPTIONS = {"model_type": "hyenadna", "vocab_size": 12, "hyena_order": 2, "use_bias": True, "activation_freq": 10}
REMOTE = "transformers_modules."
LOAD = """
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float64)
assert type(model).__module__.startswith("transformers_modules.")
torch.save(model(torch.load(sys.argv[2])).last_hidden_state, sys.argv[3])
"""


def write_folder(case: Case, form: str, folder):
    """A folder as `LongSafari/hyenadna-*-hf` has it, or with `weights.ckpt` of a training with checkpointing."""
    folder.mkdir()
    state = released_state(case)
    if form == "weights.ckpt":
        state = {f"model.{name}": one for name, one in state.items()}
        for part in ("mixer", "mlp"):
            state = {name.replace(f".{part}.", f".{part}.layer."): one for name, one in state.items()}
        state["model.lm_head.weight"] = state["model.backbone.embeddings.word_embeddings.weight"]
        torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": {"lr": 6e-4}}, folder / form)
    else:
        repeated = ("implicit_filter.3.freq", "implicit_filter.5.freq")
        state = {f"hyena.{name}": one.clone() for name, one in state.items() if not name.endswith(repeated)}
        save = save_file if form == "model.safetensors" else torch.save
        save(state, folder / form)
    options = case.hparams if form == "weights.ckpt" else HF_OPTIONS
    (folder / "config.json").write_text(json.dumps(options))


@pytest.mark.parametrize("form", ["model.safetensors", *slow("pytorch_model.bin", "weights.ckpt")])
def test_folders_of_the_hub(form, tmp_path):
    """Hidden states of the converted folder, also after it is saved again, and a text that its tokenizer reads."""
    case = Case("hyenadna/tiny", "2")
    write_folder(case, form, tmp_path / "hub")
    run_script("convert_original", tmp_path / "hub", tmp_path / "converted", "--architecture", "hyenadna")
    AutoModelForCausalLM.from_pretrained(tmp_path / "converted").save_pretrained(tmp_path / "again")
    for folder in ("converted", "again"):
        model = AutoModel.from_pretrained(tmp_path / folder, dtype=torch.float64)
        assert relative_error(model(case.ids("ids")).last_hidden_state, case.output()) < 1e-9
    model, tokenizer = (auto.from_pretrained(tmp_path / "converted") for auto in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer(["ACGTN", "ac"], padding=True, return_tensors="pt", add_special_tokens=False)
    assert prompt.input_ids.tolist() == [[7, 8, 9, 10, 11], [4, 4, 4, 7, 8]]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    written = model.double().generate(**prompt, **options)
    assert torch.equal(written, model.generate(**prompt, use_cache=False, **options))
    if form == "pytorch_model.bin":  # where the package is not installed
        torch.save(case.ids("ids"), tmp_path / "ids")
        program = [sys.executable, "-c", WITHOUT_THE_PACKAGE + LOAD]
        environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
        processes.run([*program, tmp_path / "again", tmp_path / "ids", tmp_path / "states"], env=environment)
        assert relative_error(torch.load(tmp_path / "states"), case.output()) < 1e-9


@pytest.mark.parametrize("change, message", [
    ({"hyena_order": 3}, "hyena_order must be 2 for a conversion, got 3"),
    ({"backbone.layers.1.mixer.filter_fn.pos_emb.z": None}, "Missing .*layers.1.mixer.tno.features"),
    ({"backbone.layers.0.mixer.filter_fn.pos_emb.z": None}, "must hold filters of Hyena, got nothing for"),
    ({"backbone.layers.0.mixer.filter_fn.modulation.shift": torch.zeros(1)}, "Unexpected .*modulation.shift"),
])  # fmt: skip
def test_what_does_not_fit(change, message):
    state = released_state(Case("hyenadna/tiny", "0"))
    options = {name: value for name, value in change.items() if "." not in name}
    state |= {name: value for name, value in change.items() if "." in name}
    with pytest.raises(ValueError, match=message):
        convert({name: one for name, one in state.items() if one is not None}, options, "hyenadna")


@pytest.mark.parametrize("weights", conversion.WEIGHTS)
def test_weights_of_a_repository(weights, monkeypatch, tmp_path):
    """The safest file that the repository has, and no other one."""
    held = {"config.json", *conversion.WEIGHTS[conversion.WEIGHTS.index(weights) :]}

    def download(repo_id, allow_patterns):
        for name in held & set(allow_patterns):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(conversion, "snapshot_download", download)
    assert {file.name for file in conversion.fetch("user/name").iterdir()} == {"config.json", weights}


@pytest.mark.slow
def test_from_the_hub_to_the_hub(tmp_path):
    """A repository is converted by its name and pushed. It loads with the package, and without it."""
    case, options = Case("hyenadna/tiny", "2"), ["--architecture", "hyenadna"]
    write_folder(case, "model.safetensors", tmp_path / "released")
    torch.save(case.ids("ids"), tmp_path / "ids")
    scripts = ROOT / "scripts"
    with HubServer() as hub:
        released = {file.name: file.read_bytes() for file in (tmp_path / "released").iterdir()}
        hub.repos["user/hyenadna-tiny-1k-seqlen-hf"] = repository = Repo(private=False)
        repository.add_commit(released | {"pytorch_model.bin": b"never read"})
        user = {"env": environment(hub, tmp_path), "cwd": tmp_path, "check": True}
        convert = [scripts / "convert_original.py", "user/hyenadna-tiny-1k-seqlen-hf", "converted", *options]
        processes.run([sys.executable, *convert], **user)
        processes.run([sys.executable, scripts / "push_to_hub.py", "converted", "--repo_id", "user/dna"], **user)
        assert not {"pytorch_model.bin", "original.json"} & hub.files("user/dna").keys()
        given = ("user/dna", tmp_path / "ids", tmp_path / "states")
        for setup, module in (("import sys, modeling_tnn\n", "modeling_tnn."), (WITHOUT_THE_PACKAGE, REMOTE)):
            code = LOAD.replace(REMOTE, module).replace("code=True", f"code={module == REMOTE}")
            client(hub, tmp_path, code, *given, setup=setup)
            assert relative_error(torch.load(tmp_path / "states"), case.output()) < 1e-9
            (tmp_path / "states").unlink()
