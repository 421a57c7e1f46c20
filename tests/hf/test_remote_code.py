"""Remote code: what a saved folder carries, used where the package cannot be imported; fine-tuning and resuming."""

import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_import_files

import modeling_tnn
from helpers import processes
from helpers.hub_server import WITHOUT_THE_PACKAGE
from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import (
    AUTO,
    INPUT_IDS,
    UNALIGNED,
    VARIANTS,
    image_config,
    perturbed_model,
    relative_error,
    seeded,
    tiny_config,
)
from modeling_tnn import (
    TnnConfig,
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
    TnnForTokenClassification,
    ToeplitzOperator,
)
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.configuration_tnn import TOEPLITZ
from modeling_tnn.hub import AUTO_MAP
from modeling_tnn.tno_auto import OPERATORS
from modeling_tnn.tools.operator_code import operator_code

PACKAGE = Path(modeling_tnn.__file__).parent
CODE = {Path(file).name for file in get_relative_import_files(PACKAGE / "modeling_tnn.py")} | {"modeling_tnn.py"}
FEW = [(TnnForCausalLM, "rtf", True, MIXED["hyena"]), (TnnForMaskedLM, "ski", False, HYBRIDS["sliding"]),
       (TnnForSequenceClassification, "fd", False)]  # fmt: skip
LAYERS = HYBRIDS["layers"].copy()
LAYERS.pop("norm_type")  # `perturbed_model` has its own
EVERY = [
    (head, tno_type, causal)
    for tno_type, causal in VARIANTS
    for head in (TnnForCausalLM if causal else TnnForMaskedLM, TnnForSequenceClassification)
]
EVERY += [(TnnForTokenClassification, "rpe", False), (TnnForQuestionAnswering, "rtf", True),
          (TnnForCausalLM, "rpe", True, HYBRIDS["full"]), (TnnForMaskedLM, "ski", False, MIXED["s4"]),
          (TnnForCausalLM, "rpe", True, LAYERS)]  # fmt: skip
PROMPT, OPTIONS = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 9, "eos_token_id": None}

# What every script below runs under: an environment in which the package does not exist.

LOAD = """
import json, torch, transformers
from safetensors.torch import save_file
outputs, saved = {}, json.loads(sys.argv[1])
for auto, folder in saved:
    model, info = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert not any(info.values()), info
    outputs[folder] = model(torch.arange(22).view(2, 11) * 4)[0].detach().contiguous()
    if auto == "AutoModelForCausalLM":
        outputs[folder + "/generated"] = model.generate(torch.tensor([[5, 6]]), max_new_tokens=9, eos_token_id=None)
        body = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert torch.equal(body.embed_tokens.weight, model.model.embed_tokens.weight)
        other = transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        assert other.model.config.auto_map == model.config.auto_map
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    outputs[folder + "/changed"] = model(torch.arange(22).view(2, 11) * 4)[0].detach().contiguous()
    model.save_pretrained(folder + "/again")
save_file(outputs, sys.argv[2])
"""


def run(code: str, *arguments, folder: Path, check: bool = True, installed: bool = False):
    """Run `code` in a fresh process, in `folder`, where transformers is installed and this package may be."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    code = ("import sys, modeling_tnn\n" if installed else WITHOUT_THE_PACKAGE) + code
    return processes.run([sys.executable, "-c", code, *arguments], check, cwd=folder, env=environment)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "every"])
def test_heads_and_variants(every, tmp_path):
    """Load, run, generate, change, save; and load what was saved, with the package and without it."""
    saved, models = [], {}
    for index, (head, tno_type, causal, *fields) in enumerate(FEW + EVERY if every else FEW):
        folder = str(tmp_path / str(index))
        models[folder] = perturbed_model(head, tno_type, causal, **(fields[0] if fields else {}))
        models[folder].save_pretrained(folder)
        saved.append((AUTO[head].__name__, folder))
    run(LOAD, json.dumps(saved), tmp_path / "once", folder=tmp_path)
    outputs = load_file(tmp_path / "once")
    for folder, model in models.items():
        assert relative_error(outputs[folder], model(INPUT_IDS)[0]) < UNALIGNED, folder
        if type(model) is TnnForCausalLM:
            generated = model.generate(torch.tensor([[5, 6]]), max_new_tokens=9, eos_token_id=None)
            assert torch.equal(outputs[f"{folder}/generated"], generated)
        again = AUTO[type(model)].from_pretrained(f"{folder}/again")
        assert type(again) is type(model)
        changed = dict(again.named_parameters())
        assert all(torch.equal(changed[name], 0.9 * value) for name, value in model.named_parameters())
        assert relative_error(outputs[f"{folder}/changed"], again(INPUT_IDS)[0]) < UNALIGNED
        assert load_file(f"{folder}/again/model.safetensors").keys() <= model.state_dict().keys()
    if not every:
        return
    resaved = [(auto, f"{folder}/again") for auto, folder in saved]
    run(LOAD, json.dumps(resaved), tmp_path / "twice", folder=tmp_path)
    twice = load_file(tmp_path / "twice")
    for folder in models:
        assert relative_error(twice[f"{folder}/again"], outputs[f"{folder}/changed"]) < UNALIGNED


OTHERS = """
import torch
from transformers import AutoModelForAudioClassification, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoModelForTimeSeriesPrediction
from safetensors.torch import save_file
converted = AutoModelForCausalLM.from_pretrained("converted", trust_remote_code=True)
assert converted.config.tno_type == "modal"
ids = torch.arange(22).view(2, 11) * 4
image = AutoModelForImageClassification.from_pretrained("image", trust_remote_code=True)
audio = AutoModelForAudioClassification.from_pretrained("audio", trust_remote_code=True)
series = AutoModelForTimeSeriesPrediction.from_pretrained("series", trust_remote_code=True)
outputs = {"converted": converted(ids), "image": image(torch.ones(2, 3, 24, 24)), "audio": audio(torch.ones(2, 9))}
outputs = {name: output.logits.detach().contiguous() for name, output in outputs.items()}
save_file(outputs | {"series": series.generate(ids[..., None].float(), prediction_length=7).sequences}, "outputs")
for extra in (converted.to_recurrent, lambda: converted.generate(ids, cache_implementation="static")):
    try:
        extra()
    except ImportError as error:
        assert "pip install modeling-tnn" in str(error), error
    else:
        raise AssertionError(extra)
"""


@pytest.mark.slow
def test_converted_models_images_and_signals(tmp_path):
    """What a folder does not carry is refused with a line that names the package."""
    models = {
        "converted": seeded(TnnForCausalLM, tiny_config(decay=0.9)).to_recurrent(order=8)[0],
        "image": seeded(TnnForImageClassification, image_config()),
        "audio": seeded(TnnForAudioClassification, tiny_config(input_channels=1)),
        "series": seeded(TnnForTimeSeriesPrediction, tiny_config("rtf", input_channels=1, prediction_length=3)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    run(OTHERS, folder=tmp_path)
    outputs, ids = load_file(tmp_path / "outputs"), torch.arange(22).view(2, 11) * 4
    assert relative_error(outputs["converted"], models["converted"](ids).logits) < UNALIGNED
    assert relative_error(outputs["image"], models["image"](torch.ones(2, 3, 24, 24)).logits) < UNALIGNED
    assert relative_error(outputs["audio"], models["audio"](torch.ones(2, 9)).logits) < UNALIGNED
    forecast = models["series"].generate(ids[..., None].float(), prediction_length=7).sequences
    assert relative_error(outputs["series"], forecast) < UNALIGNED


def test_a_folder_is_complete(tmp_path):
    """All files that the models import, as they are, and a map that names existing classes."""
    for head in AUTO:
        folder = tmp_path / head.__name__
        head(tiny_config(causal=head is not TnnForMaskedLM)).save_pretrained(folder)
        assert {path.name for path in folder.glob("*.py")} == CODE
        assert all((folder / name).read_bytes() == (PACKAGE / name).read_bytes() for name in CODE)
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
    others = {f"AutoModelFor{name}" for name in ("AudioClassification", "ImageClassification", "TimeSeriesPrediction")}
    assert set(AUTO_MAP) == {"AutoConfig"} | others | {auto.__name__ for auto in AUTO.values()}
    for reference in AUTO_MAP.values():
        assert get_class_from_dynamic_module(reference, folder).__name__ == reference.split(".")[1]


ALONE = """
import json, transformers
from pathlib import Path
config = transformers.AutoConfig.from_pretrained("model", trust_remote_code=True)
modules = [module for name, module in sys.modules.items() if name.startswith("transformers_modules.model")]
files = {Path(module.__file__).name for module in modules if getattr(module, "__file__", None)} - {"__init__.py"}
assert files == {"configuration_tnn.py", "extensions.py", "hub.py"}, files
config.save_pretrained("again")
assert {path.name for path in Path("again").iterdir()} == files | {"config.json"}
named = json.loads(Path("again/config.json").read_text())["auto_map"]
assert named == {"AutoConfig": "configuration_tnn.TnnConfig"}, named
"""


def test_a_configuration_alone(tmp_path):
    """Loading one executes three files. Saved without a model, it names no file that is not there.

    No code runs without permission.
    """
    tiny_config().save_pretrained(tmp_path / "config")
    assert [path.name for path in (tmp_path / "config").iterdir()] == ["config.json"]
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(tmp_path / "model")
    run(ALONE, folder=tmp_path)
    code = "from transformers import AutoModel\nAutoModel.from_pretrained('model', trust_remote_code=False)"
    result = run(code, folder=tmp_path, check=False)
    assert result.returncode and "trust_remote_code=True" in result.stderr


def test_installed_classes_go_first(tmp_path):
    """Where the package is installed, there is no question about remote code, and the copies are not run."""
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(tmp_path)
    (tmp_path / "modeling_tnn.py").write_text("raise RuntimeError('the copy has been run')")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(loaded) is TnnForCausalLM and type(loaded.config) is TnnConfig


@pytest.mark.parametrize("tno_type", ["rpe", "rtf", "modal"])
def test_both_copies_in_one_process(tno_type, tmp_path):
    """The cache layer registers itself by name: models of both copies go on generating, each with its own state."""
    local = perturbed_model(TnnForCausalLM, tno_type, True)
    local.save_pretrained(tmp_path)
    expected = [local.generate(PROMPT, num_beams=beams, **OPTIONS) for beams in (1, 2)]
    remote_class = get_class_from_dynamic_module("modeling_tnn.TnnForCausalLM", tmp_path)
    remote = remote_class.from_pretrained(tmp_path)
    assert remote_class is not TnnForCausalLM
    for model in (remote, local):
        for beams, tokens in zip((1, 2), expected, strict=True):
            assert torch.equal(model.generate(PROMPT, num_beams=beams, **OPTIONS), tokens)
    past = remote(PROMPT, use_cache=True).past_key_values
    continued = local(PROMPT, past_key_values=past).logits
    assert relative_error(continued, local(torch.cat([PROMPT, PROMPT], dim=1)).logits[:, 3:]) < 1e-5


def test_a_copy_of_another_version_in_one_process(tmp_path, monkeypatch):
    """A model does not decode with the classes of a copy that was imported after its own."""
    for mapping in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
        monkeypatch.setitem(mapping, TOEPLITZ, mapping[TOEPLITZ])  # which the copy may replace
    local = perturbed_model(TnnForCausalLM, "rtf", True)
    expected = [local.generate(PROMPT, num_beams=beams, **OPTIONS) for beams in (1, 2)]
    local.save_pretrained(tmp_path)
    code = tmp_path / "cache_tnn.py"
    code.write_text(code.read_text() + "\n\nTnnCacheLayer.update = None\n")
    get_class_from_dynamic_module("modeling_tnn.TnnForCausalLM", tmp_path)
    assert not issubclass(DYNAMIC_LAYER_TYPE_MAPPING[TOEPLITZ], TnnCacheLayer)
    for cache in ({"cache_implementation": "dynamic"}, {"cache_implementation": "static", "disable_compile": True}):
        for beams, tokens in zip((1, 2), expected, strict=True):
            assert torch.equal(local.generate(PROMPT, num_beams=beams, **OPTIONS, **cache), tokens)
    past = DynamicCache(config=local.config)
    past.activate_past_recording()
    local.generate(PROMPT, past_key_values=past, **OPTIONS | {"max_new_tokens": 100})
    past.crop(-90)
    assert past.get_seq_length() == 12


OF_A_USER = """
import torch, transformers
from safetensors.torch import save_file
ids, load = torch.arange(22).view(2, 11) * 4, transformers.AutoModelForCausalLM.from_pretrained
for folder, again in (("model", "again"), ("again", "twice")):
    model = load(folder, trust_remote_code=True)
    assert transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).tno_type == "page"
    save_file({"logits": model(ids).logits.detach()}, again + ".outputs")
    model.save_pretrained(again)
assert "gaussian_operator" not in sys.modules
for folder, trusted, words in (("model", False, "trust_remote_code=True"), ("changed", True, "`layers.0` differs")):
    try:
        load(folder, trust_remote_code=trusted)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(folder)
"""


def test_the_operator_of_a_user(tmp_path, monkeypatch):
    """That of the page on adding one, saved twice; and one whose shipped code has another number."""
    page = (PACKAGE.parent / "docs" / "development" / "adding-an-operator.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[:2]).replace('"gaussian"', '"page"')
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "gaussian_operator.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "user")
    monkeypatch.setitem(OPERATORS, "page", None)
    import_module("gaussian_operator")
    model = seeded(TnnForCausalLM, tiny_config("page", num_gaussians=3))
    model.save_pretrained(tmp_path / "model")
    changed = shutil.copytree(tmp_path / "model", tmp_path / "changed") / "gaussian_operator.py"
    changed.write_text(changed.read_text().replace("-0.5", "-0.6"))
    run(OF_A_USER, folder=tmp_path)
    for name in ("again", "twice"):
        logits = load_file(tmp_path / f"{name}.outputs")["logits"]
        assert relative_error(logits, model(INPUT_IDS).logits) < UNALIGNED
    assert {path.name for path in (tmp_path / "twice").glob("*.py")} == CODE | {
        "gaussian_operator.py",
        "operators_tnn.py",
    }
    monkeypatch.delitem(OPERATORS, "page")
    with pytest.raises(
        ValueError, match="import its module first"
    ):  # where the package is, no code of the folder runs
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)


STAY = {
    "from .other import x": "imports from files beside it",
    "import beside": "imports from files beside it",
    "import modeling_tnn": "imports modeling_tnn as a whole",
    "from modeling_tnn import load_preset": "imports load_preset of modeling_tnn",
    "from modeling_tnn.tools.poles import find_unstable": "imports find_unstable of modeling_tnn",
}
TRAVEL = {
    "if True:\n    from modeling_tnn import (\n        TnnConfig as C,  # a\n        TnnModel,\n    )\n": "if True:\n"
    "    from .configuration_tnn import TnnConfig as C\n    from .modeling_tnn import TnnModel\n",
    "import os\nfrom modeling_tnn.tno import ToeplitzOperator\n": "import os\nfrom .tno import ToeplitzOperator\n",
}


def test_files_that_travel_and_that_do_not(tmp_path, caplog, monkeypatch):
    """The latter are named, and the model is saved without them."""
    (tmp_path / "beside.py").touch()
    cls, file = type("Own", (ToeplitzOperator,), {"__module__": "own"}), tmp_path / "own.py"
    for code, made in TRAVEL.items():
        file.write_text(code)
        assert operator_code(cls, file, {PACKAGE / name for name in CODE}).decode() == made
    for code, message in STAY.items():
        file.write_text(code)
        with pytest.raises(ValueError, match=message):
            operator_code(cls, file, {PACKAGE / name for name in CODE})
    stay = type("Cell", (OPERATORS["explicit"],), {"__module__": "__main__"})
    monkeypatch.setitem(OPERATORS, "cell", stay)
    seeded(TnnForCausalLM, tiny_config("cell", explicit_length=5)).save_pretrained(tmp_path / "model")
    assert "does not travel" in caplog.text and "__main__.Cell is not a class of a module with a file" in caplog.text
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (saved["auto_map"], saved["tno_class"]) == (AUTO_MAP, "__main__.Cell")


TRAIN = """
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
ids = torch.randint(3, 99, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()
for run in sys.argv[1:]:
    output, _, checkpoint = run.partition("<")
    model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
    args = TrainingArguments(
        output_dir=output, max_steps=6, save_steps=3, learning_rate=1e-2, per_device_train_batch_size=8, seed=1,
        disable_tqdm=True, use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
    trainer.train(resume_from_checkpoint=checkpoint or None)
    assert trainer.state.global_step == 6
"""


@pytest.mark.slow
def test_trainer_checkpoints_resume_both_ways(tmp_path):
    """Three steps with one copy of the code and three with the other are six steps with any of them."""
    # By the eager implementation, whose loss is transformers' own with the package too: the same bits.
    config = tiny_config(hidden_dropout_prob=0.0, tno_implementation="eager")
    seeded(TnnForCausalLM, config).save_pretrained(tmp_path / "model")
    run(TRAIN, "remote", folder=tmp_path)
    run(TRAIN, "local", "remote-local<remote/checkpoint-3", folder=tmp_path, installed=True)
    run(TRAIN, "local-remote<local/checkpoint-3", folder=tmp_path)
    start = load_file(tmp_path / "model" / "model.safetensors")
    expected = load_file(tmp_path / "local" / "checkpoint-6" / "model.safetensors")
    assert any(not torch.equal(start[name], value) for name, value in expected.items())
    for run_name in ("remote", "remote-local", "local-remote"):
        checkpoint = tmp_path / run_name / "checkpoint-6"
        assert {path.name for path in checkpoint.glob("*.py")} == CODE
        weights = load_file(checkpoint / "model.safetensors")
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
