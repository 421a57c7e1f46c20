"""A folder proves itself when it is loaded: faults of weights, configuration and code are named, and nothing else."""

import copy
import json
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.heads import OTHER_AUTO
from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import AUTO, VALUES, VARIANTS, image_config, perturbed_model, seeded, slow
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, TnnModel, modeling_tnn, self_check
from modeling_tnn.self_check import FILE, SWITCH, SelfCheckError
from modeling_tnn.tno_rtf import RtfOperator

FIELDS = {"num_hidden_layers": 3, "tie_word_embeddings": False, "hidden_act": "gelu", "scale_embedding": True}
LAYER = "model.layers.{}.{}"


def changed(name, change):
    """A fault of the weights: the tensor `name` is what `change` makes of it."""
    return lambda folder, patch: rewrite(folder, lambda weights: weights.update({name: change(weights[name])}))


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(
        {name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def configured(**fields):
    """A fault of the configuration; a field that is `...` is missing, so that its default holds."""

    def spoil(folder, patch):
        config = json.loads((folder / "config.json").read_text()) | fields
        config = {name: value for name, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def coded(owner, name, make):
    """A fault of the code: what `make` makes of the function `name`."""
    return lambda folder, patch: patch.setattr(owner, name, make(getattr(owner, name)))


def exchange_layers(weights):
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        other = name.replace("layers.1", "layers.2")
        weights[name], weights[other] = weights[other], weights[name]


def swapped(first, second):
    def swap(tensor):
        tensor = tensor.clone()
        tensor[[first, second]] = tensor[[second, first]]
        return tensor

    return swap


def one_number(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[7] *= 1.01
    return tensor


def another_model(folder, patch):
    torch.manual_seed(1)
    other = TnnForCausalLM(seeded_model().config).state_dict()
    rewrite(folder, lambda weights: weights.update({name: other[name] for name in weights}))


def seeded_model(**fields):
    return perturbed_model(TnnForCausalLM, "rtf", True, **FIELDS | fields)


FAULTS = {  # and the part of the model that is named
    "re-initialised": (changed(LAYER.format(1, "mixer.u_proj.weight"), torch.randn_like), "layers.1"),
    "rows swapped": (changed(LAYER.format(0, "glu.up_proj.weight"), swapped(3, 4)), "layers.0"),
    "tokens swapped": (changed("model.embed_tokens.weight", swapped(97, 98)), "embed_tokens"),
    "answers swapped": (changed("lm_head.weight", swapped(97, 98)), "logits"),
    "poles rounded": (changed(LAYER.format(2, "mixer.tno.denominator"), lambda x: x.bfloat16().float()), "layers.2"),
    "zeros": (changed(LAYER.format(1, "mixer.o_proj.bias"), torch.zeros_like), "layers.1"),
    "one number": (changed(LAYER.format(2, "glu.down_proj.weight"), one_number), "layers.2"),
    "scaled": (changed(LAYER.format(0, "mixer.v_proj.weight"), lambda x: 1.001 * x), "layers.0"),
    "not finite": (changed(LAYER.format(1, "glu.up_proj.bias"), lambda x: x * torch.nan), "layers.1"),
    "a norm": (changed(LAYER.format(1, "glu_norm.weight"), lambda x: x + 0.01), "layers.1"),
    "layers exchanged": (lambda folder, patch: rewrite(folder, exchange_layers), "layers.1"),
    "left out": (lambda folder, _: rewrite(folder, lambda x: x.pop(LAYER.format(2, "mixer.u_proj.bias"))), "layers.2"),
    "another model": (another_model, "embed_tokens"),
    "another field": (configured(norm_position="post"), "layers.0"),
    "another default": (configured(hidden_act=...), "layers.0"),
    "a constraint": (configured(rtf_constraint=None), "layers.0"),
    "a scale": (configured(scale_embedding=False), "embeddings"),
    "a mask": (coded(modeling_tnn, "check_attention_mask", lambda _: lambda *given: None), "layers.0"),
    "a line of a norm": (coded(modeling_tnn, "with_mask", lambda _: lambda norm, mask: lambda x: 2 * x), "layers.0"),
    "a line of an operator": (
        coded(RtfOperator, "coefficients", lambda old: lambda *given, **k: old(*given, **k).flip(0)), "layers.0"),
    "a residual": (coded(modeling_tnn.TnnGatedLinearUnit, "mix", lambda old: lambda *given: -old(*given)), "layers.0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    seeded_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, saved, tmp_path, monkeypatch):
    """With each head, and after a save in half precision as well."""
    folder, (spoil, part) = shutil.copytree(saved, tmp_path / "model"), FAULTS[fault]
    spoil(folder, monkeypatch)
    with pytest.raises(SelfCheckError, match=re.escape(f"`{part}` differs first")):
        AutoModelForCausalLM.from_pretrained(folder)
    if part != "logits":
        with pytest.raises(SelfCheckError, match=re.escape(f"`{part}` differs first")):
            AutoModelForSequenceClassification.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, self_check=False)
    monkeypatch.setattr(self_check, "AT_LOAD", 1000)  # the model is large now, and checked at its passes
    model, tokens = AutoModelForCausalLM.from_pretrained(folder), torch.arange(9)[None]
    for run in (model, model.generate):
        with pytest.raises(SelfCheckError, match=re.escape(f"`{part}` differs first")):
            run(tokens)
    monkeypatch.setenv(SWITCH, "0")
    AutoModel.from_pretrained(folder)
    assert model(tokens) and not model._forward_pre_hooks


@pytest.fixture
def checks(monkeypatch, caplog):
    """The number of comparisons so far, after the last of which nothing was logged."""
    made, compare = [], self_check.compare
    monkeypatch.setattr(self_check, "compare", lambda *given: made.append(compare(*given)))

    def count():
        assert not [one.getMessage() for one in caplog.records if one.name == self_check.__name__]
        return len(made)

    return count


OTHERS = [(head, {}) for head in AUTO] + [(TnnForCausalLM, fields) for fields in (HYBRIDS["full"], *MIXED.values())]
OTHERS += [(head, fields) for head, fields, _ in VALUES.values()]


@pytest.mark.parametrize("variant", VARIANTS[::4] + slow(*zip(VARIANTS[1::4] + VARIANTS[2::4] + VARIANTS[3::4])))
def test_no_false_alarms(variant, tmp_path, checks):
    for count, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        model = perturbed_model(TnnForCausalLM if variant[1] else TnnForMaskedLM, *variant).to(dtype)
        model.save_pretrained(tmp_path, max_shard_size="40KB" if dtype == torch.float16 else "5GB")
        for loaded in ("auto", torch.float32, torch.bfloat16, torch.float16):
            type(model).from_pretrained(tmp_path, dtype=loaded, device_map="auto" if loaded == "auto" else None)
        AutoModel.from_pretrained(tmp_path)
        assert checks() == 5 * (count + 1)
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize("head, fields", OTHERS)
def test_no_false_alarms_of_heads(head, fields, tmp_path, checks):
    causal = head is not TnnForMaskedLM
    perturbed_model(head, "rpe", causal, **fields).save_pretrained(tmp_path)
    for auto in (AUTO.get(head, OTHER_AUTO.get(head)), AutoModel):
        auto.from_pretrained(tmp_path, num_labels=2, use_cache=False)
    assert checks() == 2
    names = json.loads((tmp_path / FILE).read_text())["blocks"].keys()
    assert head is TnnModel or {"layers.1", "norm"} < names and [*names][-1] not in ("layers.1", "norm")


def test_images(tmp_path, checks):
    seeded(TnnForImageClassification, image_config("ski")).save_pretrained(tmp_path)
    TnnForImageClassification.from_pretrained(tmp_path)
    assert checks() == 1


def test_what_is_not_checked_is_said(saved, tmp_path, caplog, monkeypatch):
    """In one line; a folder without summaries loads in silence. Edits after loading are no faults."""
    places = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "cpu", "layers.2": "disk", "norm": "cpu"}
    for options, line in (
        ({"hidden_act": "relu", "use_cache": False}, "the caller has chosen hidden_act"),
        ({"num_hidden_layers": 2}, "the caller has chosen num_hidden_layers"),
        ({"ignore_mismatched_sizes": True}, "the caller has chosen ignore_mismatched_sizes"),
        ({"device_map": places, "offload_folder": tmp_path}, "weights are quantized or elsewhere"),
    ):
        caplog.clear()
        AutoModel.from_pretrained(saved, **options)
        assert [one.getMessage() for one in caplog.records if "was not checked" in one.getMessage()] == [
            f"{saved} was not checked: {line}"
        ], options
    folder = shutil.copytree(saved, tmp_path / "model")
    for content in ("", "[]", "{}", '{"class": 1, "length": "x"}'):
        caplog.clear()
        (folder / FILE).write_text(content)
        AutoModel.from_pretrained(folder)
        assert f"{folder} was not checked" in caplog.text
    (folder / FILE).unlink()
    caplog.clear()
    AutoModel.from_pretrained(folder)
    assert "was not checked" not in caplog.text


def test_what_is_saved_is_what_is_checked(tmp_path, monkeypatch, caplog):
    """The weights that are written, not those of the model; random numbers stay. A failure leaves the model saved."""
    model, state = seeded_model().train(), torch.get_rng_state()
    model.save_pretrained(tmp_path, state_dict={name: 2 * one for name, one in model.state_dict().items()})
    assert torch.equal(state, torch.get_rng_state()) and model.training and (tmp_path / FILE).stat().st_size < 2000
    TnnForCausalLM.from_pretrained(tmp_path)
    wide = model.state_dict()
    model.bfloat16().save_pretrained(tmp_path, state_dict=wide)  # the configuration says bfloat16
    TnnForCausalLM.from_pretrained(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["dtype"] == "float32" and not caplog.records
    monkeypatch.setattr("modeling_tnn.tools.checks.LARGEST", 1000)
    model.save_pretrained(tmp_path)
    assert "has no self-check: the model has more than 1,000 parameters" in caplog.text
    assert not (tmp_path / FILE).exists()
    TnnForCausalLM.from_pretrained(tmp_path)


CHANGES = {
    "in place": lambda model: model.lm_head.weight.requires_grad_(False).copy_(model.lm_head.weight.flip(0)),
    "unseen": lambda model: model.lm_head.weight.data[3].zero_(),
    "cast": TnnForCausalLM.bfloat16,
    "added": lambda model: model.register_parameter("extra", torch.nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("use", ["as it is", "copied", *CHANGES])
def test_large_models_are_checked_at_the_first_pass(use, saved, tmp_path, checks, caplog, monkeypatch):
    """In evaluation, once, unless their weights were changed."""
    monkeypatch.setattr(self_check, "AT_LOAD", 1000)
    model, tokens = TnnForCausalLM.from_pretrained(saved), torch.arange(9)[None]
    model.train()(tokens)
    torch.compile(model.eval(), backend="eager", fullgraph=True)(tokens, use_cache=False)
    torch.export.export(model, (tokens,), {"use_cache": False})
    model.save_pretrained(tmp_path)
    assert pickle.dumps(model) and checks() == 0 and len(model._forward_pre_hooks) == 1
    model = copy.deepcopy(model) if use == "copied" else model
    CHANGES.get(use, id)(model)
    assert model(tokens) and model(tokens) and not model._forward_pre_hooks
    assert caplog.text.count("not checked: its weights have changed since it was loaded") == (use in CHANGES)
    caplog.clear()
    assert checks() == (use not in CHANGES)
