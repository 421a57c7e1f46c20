"""Fields that change after a configuration was made: overrides, assignments, and what a trained model keeps."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

from helpers.hybrids import HYBRIDS
from helpers.models import VARIANTS, relative_error, seeded, tiny_config
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnModel
from modeling_tnn.configuration_tnn import DERIVED

IDS = torch.arange(99)[None].repeat(1, 2)  # (1, 198), beyond max_position_embeddings=64


@pytest.fixture
def preset(tmp_path):
    """A configuration as `configuration/` has them: without what follows from other fields."""
    fields = tiny_config().to_dict()
    for name in (*DERIVED, "transformers_version"):
        fields.pop(name, None)  # those of attention are absent without it
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_overrides_are_checked_and_derived_from(preset):
    short = {"tno_type": "rtf", "max_position_embeddings": 8}
    for overrides, message in (
        ({"tno_type": "ski"}, "`causal` must be .*False with tno_type='ski'.*, got True"),
        ({"hidden_size": 0}, r"`hidden_size` must be in \[1, .*, got 0"),
        (short, "`rtf_state_size` .* below rtf_truncation_length=8.*, got 8"),
    ):
        for load in (AutoConfig.from_pretrained, TnnConfig.from_pretrained):
            with pytest.raises(ValueError, match=message):
                load(preset, **overrides)
    config, unused = TnnConfig.from_pretrained(preset, decay=0.9, nonsense=1, return_unused_kwargs=True)
    assert (config.decay, unused) == (0.9, {"nonsense": 1})
    config = AutoConfig.from_pretrained(preset, max_position_embeddings=8192, hidden_size=48)
    assert (config.fd_resolution, config.intermediate_size) == (16384, 48)
    assert (config.ski_grid_length, config.rtf_truncation_length, config.rpe_input_length) == (8192,) * 3
    # Two fields at once may each be wrong with the old value of the other.
    assert AutoConfig.from_pretrained(preset, tno_type="ski", causal=False).tno_type == "ski"


def test_assignment():
    config = TnnConfig()
    for name, value in {"decay": 2.0, "tno_type": "dct", "num_hidden_layers": 0, "fd_resolution": 100}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be .*, got {value!r}"):
            setattr(config, name, value)
    config.max_position_embeddings = 8192
    assert (config.fd_resolution, config.rtf_truncation_length) == (16384, 8192)
    config.fd_resolution = 64
    config.max_position_embeddings = 1000
    assert (config.fd_resolution, config.rtf_truncation_length) == (64, 1000), "what was set stays"
    config.fd_resolution = None
    assert config.fd_resolution == 2048, "None derives it again"
    assert "_automatic" not in config.to_dict() and copy.deepcopy(config) == config


def test_fields_are_checked_together_when_a_model_is_built_or_saved(tmp_path):
    config = tiny_config()
    config.tno_type = "ski"
    with pytest.raises(ValueError, match="`causal` must be .*tno_type='ski'.*, got True"):
        TnnForCausalLM(config)
    with pytest.raises(ValueError, match="`causal` must be .*tno_type='ski'.*, got True"):
        config.save_pretrained(tmp_path)
    config.causal = False
    TnnModel(config)


def test_a_model_keeps_what_it_was_built_with(tmp_path):
    """Its configuration must still describe it, or the saved model would be another one."""
    model = seeded(TnnModel, tiny_config("rtf"))
    model.config.max_position_embeddings = 4096
    assert (model.config.rtf_truncation_length, model.config.fd_resolution) == (64, 128)
    model.save_pretrained(tmp_path)
    loaded = TnnModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state)


FIELDS = [{"tno_type": name, "causal": causal} for name, causal in VARIANTS]


@pytest.mark.parametrize("fields", [*FIELDS, {"causal": False, "rpe_input": "normalized"}, HYBRIDS["full"]])
def test_a_maximum_at_load_changes_nothing(fields, tmp_path):
    """Nor for a configuration that was saved before the lengths of the operators were fields."""
    model = seeded(TnnModel, tiny_config(**fields))
    model.save_pretrained(tmp_path)
    for longest in (32, 1000):
        loaded = AutoModel.from_pretrained(tmp_path, max_position_embeddings=longest)
        assert loaded.config.max_position_embeddings == longest
        with torch.no_grad():
            assert relative_error(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state) < 1e-6
        file = tmp_path / "config.json"
        names = ("ski_grid_length", "rtf_truncation_length", "rpe_input_length", "explicit_length")
        kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in names}
        file.write_text(json.dumps(kept))


def test_weights_of_another_operator_are_refused(tmp_path):
    """RPE and FD have the same names and shapes."""
    seeded(TnnModel, tiny_config("rpe")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`tno_type` must be 'rpe' for these weights, got 'fd'"):
        TnnModel.from_pretrained(tmp_path, tno_type="fd")
    with pytest.raises(ValueError, match="`tno_type` must be 'rpe' for these weights, got 'fd'"):
        TnnModel.from_pretrained(tmp_path, config=tiny_config("fd"))
