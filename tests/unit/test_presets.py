"""Configurations by name."""

import pytest
import torch
import transformers
from transformers import AutoConfig

import modeling_tnn
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, list_presets, load_preset
from modeling_tnn.presets import configuration_folder, preset_folders


def test_every_folder_is_a_preset():
    assert {"tnn-tiny", "tnn-causal", "lra/tnn-listops", "peers/gpt2-tiny"} <= set(list_presets())
    assert len(list_presets()) == len(list(configuration_folder().glob("**/config.json")))


@pytest.mark.parametrize("name", [name for name in list_presets() if not name.startswith("peers/")])
def test_presets_load(name):
    config = load_preset(name)
    assert config == TnnConfig.from_pretrained(preset_folders()[name])
    assert load_preset(name.split("/")[-1]) == config


def test_fields_are_derived_from():
    config = load_preset("tnn-causal", max_position_embeddings=100)
    assert (config.max_position_embeddings, config.ski_grid_length, config.decay) == (100, 100, 0.99)


def test_unknown_preset():
    with pytest.raises(ValueError, match="name of a preset must be one of .*, got 'tnn-casual'. Did you mean tnn-c"):
        load_preset("tnn-casual")


def test_peers_are_refused():
    with pytest.raises(ValueError, match="peers/gpt2-tiny is a preset of gpt2"):
        load_preset("gpt2-tiny")


@pytest.mark.parametrize("name", [name for name in list_presets() if name.startswith("peers/")])
def test_peers_are_of_the_size_of_tnn_tiny(name):
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(configuration_folder() / name)
        peer = getattr(transformers, config.architectures[0])(config)
        masked = config.architectures[0].endswith("ForMaskedLM")
        model_class = TnnForMaskedLM if masked else TnnForCausalLM
        ours = model_class(load_preset("tnn-tiny", causal=not masked))
    # The rows of GPT-2's table that training does not reach.
    unused = max(getattr(peer.config, "n_positions", 512) - 512, 0) * peer.config.hidden_size
    assert peer.num_parameters() - unused == pytest.approx(ours.num_parameters(), rel=0.05)


def test_unknown_name_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'TnnForEverything'"):
        modeling_tnn.TnnForEverything  # noqa: B018
    assert {"TnnForCausalLM", "load_preset"} <= set(dir(modeling_tnn))
