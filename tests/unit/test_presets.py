"""Configurations by name, and the learning rates that belong to them."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

import modeling_tnn
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, list_presets, load_preset
from modeling_tnn.presets import configuration_folder, preset_folders
from tnn_scripts.common.training_arguments import find_training, read_presets, rule_of

ROOT = Path(__file__).parents[2]


def test_every_folder_is_a_preset():
    assert {"tnn-tiny", "tnn-causal", "lra/tnn-listops", "peers/gpt2-tiny"} <= set(list_presets())
    assert len(list_presets()) == len(list(configuration_folder().glob("**/config.json")))


def test_presets_load():
    for name in [name for name in list_presets() if not name.startswith("peers/")]:
        config = load_preset(name)
        assert config == TnnConfig.from_pretrained(preset_folders()[name])
        assert load_preset(name.split("/")[-1]) == config


@pytest.mark.parametrize("name", [name for name in list_presets() if "/" not in name and "image" not in name])
def test_language_models_begin_near_the_loss_of_a_guess(name):
    """The papers' start of a causal model is above it by 1.1 and more here, and by 4 to 11 at the size of a paper."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "rpe_dim": 16}
    config = load_preset(name, **sizes)
    torch.manual_seed(0)
    model = (TnnForCausalLM if config.causal else TnnForMaskedLM)(config).eval()
    text = torch.randint(1000, (2, 64))
    loss = model(input_ids=text, labels=text.roll(-1, 1)).loss.item()
    assert loss == pytest.approx(math.log(1000), abs=0.3 if config.causal else 0.8)


def test_fields_are_derived_from():
    config = load_preset("tnn-causal", max_position_embeddings=100)
    assert (config.max_position_embeddings, config.ski_grid_length, config.decay) == (100, 100, 0.99)


def test_unknown_preset():
    with pytest.raises(ValueError, match="`name` must be a preset, got 'tnn-casual'; did you mean tnn-causal"):
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


def test_every_preset_says_how_it_was_trained():
    page = (ROOT / "docs/reference/presets.md").read_text()
    for name, preset in read_presets().items():
        assert re.search(rf"\| `{name}` .* {preset.parameters:,} \|", page), name
        assert (preset.recipe is None) == (preset.learning_rate is None)
        assert preset.figures is None or (ROOT / f"docs/research/figures/{preset.figures}.json").is_file()
        assert (preset.minutes is None) or preset.figures
    assert set(read_presets()) == set(list_presets())


def test_rates_are_the_measured_ones():
    rates = {name: read_presets()[name].learning_rate for name in ("tnn-tiny", "tnn-small", "peers/mamba2-tiny")}
    assert rates == {"tnn-tiny": 8e-3, "tnn-small": 4e-3, "peers/mamba2-tiny": 1.6e-2}
    assert [rule_of(width, True).learning_rate for width in (128, 256)] == [8e-3, 4e-3]
    assert rule_of(128, False).learning_rate == 4e-3


def test_schedules_keep_their_shares():
    small = find_training(str(preset_folders()["tnn-small"]))
    assert small.schedule(240) == {
        "lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 40}, "warmup_steps": 20,
    }  # fmt: skip
    assert find_training("small-other") is None
