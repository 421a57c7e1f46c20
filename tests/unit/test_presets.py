"""Configurations by name, and the learning rates that belong to them."""

import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

import modeling_tnn
from helpers.models import seeded
from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM, list_presets, load_preset
from modeling_tnn.presets import configuration_folder, preset_folders
from tnn_cli.training_arguments import find_training, read_presets, rule_of

ROOT = Path(__file__).parents[2]


def test_every_folder_is_a_preset():
    assert {"tnn-tiny", "tnn-causal", "lra/tnn-listops", "peers/gpt2-tiny"} <= set(list_presets())
    assert len(list_presets()) == len(list(configuration_folder().glob("**/config.json")))
    for name, message in (
        ("tnn-casual", "`name` must be a preset, got 'tnn-casual'; did you mean tnn-causal"),
        ("gpt2-tiny", "peers/gpt2-tiny is a preset of gpt2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_preset(name)


def test_presets_load():
    for name in [name for name in list_presets() if not name.startswith("peers/")]:
        config = load_preset(name)
        assert config == TnnConfig.from_pretrained(preset_folders()[name])
        assert load_preset(name.split("/")[-1]) == config
    config = load_preset("tnn-causal", max_position_embeddings=100)
    assert (config.max_position_embeddings, config.ski_grid_length, config.decay) == (100, 100, 0.99)


def test_language_models_begin_near_the_loss_of_a_guess():
    """The papers' start of a causal model is above it by 1.1 and more here, and by 4 to 11 at the size of a paper."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "rpe_dim": 16}
    for name in [name for name in list_presets() if "/" not in name and "image" not in name]:
        config = load_preset(name, **sizes)
        model = seeded(TnnForCausalLM if config.causal else TnnForMaskedLM, config)
        text = torch.randint(1000, (2, 64))
        loss = model(input_ids=text, labels=text.roll(-1, 1)).loss.item()
        assert loss == pytest.approx(math.log(1000), abs=0.3 if config.causal else 0.8), name


def test_peers_are_of_the_size_of_tnn_tiny():
    for name in [name for name in list_presets() if name.startswith("peers/")]:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(configuration_folder() / name)
            peer = getattr(transformers, config.architectures[0])(config)
            masked = config.architectures[0].endswith("ForMaskedLM")
            ours = (TnnForMaskedLM if masked else TnnForCausalLM)(load_preset("tnn-tiny", causal=not masked))
        # The rows of GPT-2's table that training does not reach.
        unused = max(getattr(peer.config, "n_positions", 512) - 512, 0) * peer.config.hidden_size
        assert peer.num_parameters() - unused == pytest.approx(ours.num_parameters(), rel=0.05), name


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


def test_rates_and_schedules_are_the_measured_ones():
    rates = {name: read_presets()[name].learning_rate for name in ("tnn-tiny", "tnn-small", "peers/mamba2-tiny")}
    assert rates == {"tnn-tiny": 8e-3, "tnn-small": 4e-3, "peers/mamba2-tiny": 1.6e-2}
    rules = [rule_of(*one).learning_rate for one in ((128, True), (256, True), (128, False))]
    assert rules == [8e-3, 4e-3, 4e-3]
    options = find_training(str(preset_folders()["tnn-small"])).schedule(240)
    assert options.pop("lr_scheduler_type") == "warmup_stable_decay" and options.pop("warmup_steps") == 20
    assert options == {"lr_scheduler_kwargs": {"num_decay_steps": 40}} and find_training("small-other") is None
