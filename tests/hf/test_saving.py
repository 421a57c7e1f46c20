"""Saving and loading: sharded, in other dtypes, through the Auto classes."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from helpers.models import (
    AUTO,
    INPUT_IDS,
    UNALIGNED,
    VARIANTS,
    RandomTexts,
    perturbed_model,
    relative_error,
    seeded,
    slow,
    tiny_config,
)
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification
from modeling_tnn.hub import AUTO_MAP
from modeling_tnn.tno_auto import OPERATORS
from modeling_tnn.tools.checks import CheckpointMismatchError


def language_model(tno_type, causal, **fields):
    return perturbed_model(TnnForCausalLM if causal else TnnForMaskedLM, tno_type, causal, **fields)


def assert_same(loaded, model):
    """Every parameter and the first output."""
    state, other = loaded.state_dict(), model.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    assert relative_error(loaded(INPUT_IDS)[0], model(INPUT_IDS)[0]) < UNALIGNED


@pytest.mark.parametrize("variant", VARIANTS[::4] + slow(*zip(VARIANTS[1::4] + VARIANTS[2::4] + VARIANTS[3::4])))
def test_what_is_loaded_is_what_was_saved(variant, tmp_path):
    """Nothing may be computed in a constructor and lost: the model that is built on the meta device has no values.

    In one file or shards, with tied embeddings or not, and with a layer whose weights stay on disk until it runs.
    Another head on the same body is new and initialised. Buffers are saved: there are no others.
    """
    for tied, size in ((True, "5GB"), (False, "20KB")):
        model, folder = language_model(*variant, tie_word_embeddings=tied), tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        loaded = AUTO[type(model)].from_pretrained(folder)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert dict(loaded.named_buffers()).keys() <= loaded.state_dict().keys()
        assert_same(loaded, model)
    index = json.loads((tmp_path / "20KB" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and "lm_head.weight" in index
    assert "lm_head.weight" not in load_file(tmp_path / "5GB" / "model.safetensors")
    places = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk", "norm": "cpu"}
    divided = AutoModel.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert relative_error(divided(INPUT_IDS)[0], model.model(INPUT_IDS)[0]) < UNALIGNED
    options = {"num_labels": 3, "output_loading_info": True}
    classifier, info = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    assert all(name.startswith("classifier.") for name in info["missing_keys"])
    assert_same(classifier.model, model.model)
    assert classifier(INPUT_IDS).logits.isfinite().all() and classifier.classifier.dense.weight.abs().max() > 0


@pytest.mark.parametrize("variant", VARIANTS[::4] + slow(*zip(VARIANTS[1::4] + VARIANTS[2::4] + VARIANTS[3::4])))
def test_dtypes(variant, tmp_path):
    """Poles are in float32 where a model is built, cast or loaded in half precision.

    transformers reports names that no parameter has as typing errors: in bfloat16 all of them count.
    """
    model = language_model(*variant).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    auto = AUTO[type(model)]
    assert_same(auto.from_pretrained(tmp_path), model)
    built = [auto.from_config(model.config, dtype=d).eval() for d in (torch.float16, torch.bfloat16, torch.float64)]
    wide = auto.from_pretrained(tmp_path, dtype=torch.float32)
    for one in (model, wide, *built):
        dtype = one.model.embed_tokens.weight.dtype
        for name, parameter in one.named_parameters():
            poles = name.endswith(OPERATORS[variant[0]].fp32_parameters)
            assert parameter.dtype == (torch.promote_types(dtype, torch.float32) if poles else dtype), name
        assert one(INPUT_IDS)[0].dtype == dtype
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype is torch.float32}
    patterns = model._keep_in_fp32_modules_strict
    assert kept == {name for name in model.state_dict() if any(re.fullmatch(one, name) for one in patterns)}


def slow_model(tno_type, causal):
    """A loud model whose kernels do not fade within 512 tokens. "converted" is one with fitted poles."""
    fields = {
        "max_position_embeddings": 512,
        "s4d_state_size": 32,
        "decay": None,
        "explicit_length": 512,
        "hyena_filter_freq": 2,
    }
    fields |= {"rtf_constraint": None, "rtf_initializer": "zeros"}
    name = "rpe" if tno_type == "converted" else tno_type
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(name, causal, **fields))
    with torch.no_grad():
        for mixer in (layer.mixer for layer in model.model.layers):
            mixer.v_proj.weight.mul_(4)
            if tno_type == "rtf":  # 1 / (1 - 1.9 z + 0.995 z^2): poles of radius 0.9975
                mixer.tno.denominator[:, :2] = torch.tensor([-1.9, 0.995])
                mixer.tno.numerator.normal_()
            elif tno_type == "modal":
                mixer.tno.log_rate.uniform_(-9, -6)
    return model.to_recurrent(order=128)[0] if tno_type == "converted" else model


def cast_in_evaluation(model, dtype, folder):
    """By Trainer, which leaves the model so."""
    full = {torch.float16: "fp16_full_eval", torch.bfloat16: "bf16_full_eval"}[dtype]
    arguments = TrainingArguments(str(folder), **{full: True, "use_cpu": True, "report_to": "none"})
    Trainer(model, arguments).predict([RandomTexts()[0]])
    return model


def cast_and_load(model, dtype, folder):
    model.to(dtype).save_pretrained(folder / "cast")
    return type(model).from_pretrained(folder / "cast")


def build_and_fill(model, dtype, folder):
    built = AUTO[type(model)].from_config(model.config, dtype=dtype).eval()
    built.load_state_dict(model.state_dict())
    return built


def by_its_name(model, dtype, folder):
    return model.apply(torch.nn.Module.half if dtype == torch.float16 else torch.nn.Module.bfloat16)


CASTS = [lambda model, dtype, _: model.to(dtype), by_its_name, cast_in_evaluation, cast_and_load, build_and_fill]


CONVERTED = ("converted", True)


@pytest.mark.parametrize(
    "tno_type, causal, dtype",
    [(*variant, torch.bfloat16) for variant in [*VARIANTS[::4], CONVERTED]]
    + slow(*((*variant, torch.bfloat16) for variant in VARIANTS if variant not in VARIANTS[::4]))
    + slow(*((*variant, torch.float16) for variant in [("rtf", True), ("ski", False), CONVERTED])),
)
def test_every_cast_is_as_good_as_loading(tno_type, causal, dtype, tmp_path):
    """What must stay in float32 does, however the model came to half precision."""
    model, ids = slow_model(tno_type, causal), torch.arange(512)[None] % 97
    model.save_pretrained(tmp_path)

    def error(cast):
        logits = cast(ids).logits.double()
        return ((logits - expected).norm() / expected.norm()).item()

    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits
        assert expected.dtype == torch.float64
        loaded = error(type(model).from_pretrained(tmp_path, dtype=dtype))
        assert loaded < {torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
        errors = [error(cast(copy.deepcopy(model), dtype, tmp_path)) for cast in CASTS]
    assert max(errors) <= 2 * loaded, (loaded, errors)


def test_other_sizes_are_the_error_of_transformers(tmp_path):
    """A RuntimeError as in transformers and a ValueError as everywhere here, which names the way out."""
    seeded(TnnForSequenceClassification, tiny_config(num_labels=2)).save_pretrained(tmp_path)
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match="ignore_mismatched_sizes=True"):
            TnnForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    model = TnnForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.classifier.out_proj.out_features == 5


class WithValues(TnnForCausalLM):
    """A user's model: the body, its head, and another head."""

    def __init__(self, config):
        super().__init__(config)
        self.value_head = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()


def test_another_head_on_the_body_of_a_subclass(tmp_path):
    model = seeded(WithValues, tiny_config())
    model.save_pretrained(tmp_path)
    classifier = TnnForSequenceClassification.from_pretrained(tmp_path)
    assert relative_error(classifier.model(INPUT_IDS)[0], model.model(INPUT_IDS)[0]) < UNALIGNED
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name.replace("u_proj", "x_proj"): one for name, one in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="damaged or belong to another model"):
        TnnForSequenceClassification.from_pretrained(tmp_path)


def test_key_mapping(tmp_path):
    model = seeded(TnnForCausalLM, tiny_config())
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "backbone.", 1): one for name, one in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = TnnForCausalLM.from_pretrained(tmp_path, key_mapping={"^backbone.": "model."})
    assert relative_error(loaded(INPUT_IDS)[0], model(INPUT_IDS)[0]) < UNALIGNED


SUBCLASS = """
from modeling_tnn import TnnForCausalLM


class Scaled(TnnForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs
"""


def test_a_registered_subclass(tmp_path, monkeypatch):
    """`auto_map` names it where transformers has copied its file, and our class elsewhere."""
    (tmp_path / "scaled_models.py").write_text(SUBCLASS)
    monkeypatch.syspath_prepend(tmp_path)
    from scaled_models import Scaled

    Scaled.register_for_auto_class("AutoModelForCausalLM")
    model = seeded(Scaled, tiny_config())
    model.save_pretrained(tmp_path / "scaled")
    read = lambda name: json.loads((tmp_path / name / "config.json").read_text())["auto_map"]  # noqa: E731
    assert read("scaled") == AUTO_MAP | {"AutoModelForCausalLM": "scaled_models.Scaled"}
    assert (tmp_path / "scaled" / "scaled_models.py").exists()
    TnnForCausalLM.from_pretrained(tmp_path / "scaled").save_pretrained(tmp_path / "plain")
    assert read("plain") == AUTO_MAP


def test_files_of_a_user_with_names_of_the_code_are_moved_aside(tmp_path, caplog):
    model, code = seeded(TnnForCausalLM, tiny_config()), tmp_path / "norms.py"
    for text in ("mine = 1\n", "mine = 2\n"):
        code.write_text(text)
        with caplog.at_level("WARNING"):
            model.save_pretrained(tmp_path)
    assert "norms.py was not saved with a model. It is now" in caplog.text
    aside = [tmp_path / name for name in ("norms.py.orig", "norms.py.orig1")]
    assert [path.read_text() for path in aside] == ["mine = 1\n", "mine = 2\n"]
    own = code.read_text()
    code.write_text(own + "# an older version\n")
    model.save_pretrained(tmp_path)
    assert code.read_text() == own and len(list(tmp_path.glob("*.orig*"))) == 2
