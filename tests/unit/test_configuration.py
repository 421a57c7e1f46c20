"""The configuration: presets, parameter counts, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from helpers.models import seeded, tiny_config
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
)
from modeling_tnn.configuration_tnn import CHOICES
from modeling_tnn.modeling_tnn import NORM_POSITIONS
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.numerics import IMPLEMENTATIONS
from modeling_tnn.padding import POOLINGS
from modeling_tnn.rpe import RPE_INPUTS
from modeling_tnn.tno_2d import COMBINATIONS
from modeling_tnn.tno_rtf import CONSTRAINTS, INITIAL_BOUNDS

README = (Path(__file__).parents[2] / "configuration" / "README.md").read_text()
PRESETS = sorted(path.parent for path in (Path(__file__).parents[2] / "configuration").glob("tnn-*/config.json"))
# Trainable parameters, counted in the released code (`tnn-tiny` and `tnn-causal-rtf`: in ours).
PARAMETERS = {
    "tnn-tiny": 1_379_712,
    "tnn-causal-rtf": 49_190_400,
    "tnn-causal": 48_667_136,
    "tnn-causal-rpe3": 48_579_776,
    "tnn-causal-fd": 48_579_776,
    "tnn-bidirectional": 126_372_441,
    "tnn-bidirectional-fd": 128_019_801,
    "tnn-bidirectional-ski": 126_513_753,
    # The TNN paper says 6.4M and 23.4M; it counts the stored decays.
    "tnn-image-tiny": 6_408_232,
    "tnn-image-small": 23_373_544,
}
HEADS = {head.__name__: head for head in (TnnForCausalLM, TnnForMaskedLM, TnnForImageClassification)}


@pytest.mark.parametrize("folder", PRESETS, ids=lambda folder: folder.name)
def test_preset(folder):
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, TnnConfig)
    unknown = set(json.loads((folder / "config.json").read_text())) - set(TnnConfig().to_dict()) - {"num_labels"}
    assert not unknown
    with torch.device("meta"):
        model = HEADS[config.architectures[0]](config)
    count = model.num_parameters(only_trainable=True)
    assert count == PARAMETERS[folder.name]
    assert f"`{folder.name}`" in README and f"{count:,}" in README


def test_all_counted_presets_exist():
    assert set(PARAMETERS) == {folder.name for folder in PRESETS}


def test_round_trip(variant, tmp_path):
    config = tiny_config(*variant, decay=0.9, learnable_decay=True, intermediate_size=24, fd_resolution=256)
    config.save_pretrained(tmp_path / "first")
    AutoConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "config.json").read_text() for name in ("first", "second"))
    assert first == second
    assert json.loads(first)["fd_resolution"] == 256


def test_names_are_those_of_the_tables():
    tables = {
        "norm_type": NORM_TYPES,
        "norm_position": NORM_POSITIONS,
        "tno_implementation": IMPLEMENTATIONS,
        "rtf_constraint": CONSTRAINTS,
        "spatial_mixing": COMBINATIONS,
        "rpe_input": RPE_INPUTS,
        "rtf_initializer": INITIAL_BOUNDS,
        "classifier_pooling": {None: "by the direction"} | POOLINGS,
    }
    for name, table in tables.items():
        assert CHOICES[name] == tuple(table)


def test_derived_defaults():
    config = TnnConfig(hidden_size=48, max_position_embeddings=100, gtu_expansion=1.5)
    assert (config.intermediate_size, config.gtu_dim, config.fd_resolution) == (48, 72, 256)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tno_type": "dct"}, "tno_type='dct' .* one of 'rpe', 'fd', 'ski', 'rtf', 'modal', 'explicit'"),
        ({"tno_type": "modal", "causal": False}, "causal=False .* True with tno_type='modal'"),
        ({"tno_type": "ski", "causal": True}, "causal=True .* False with tno_type='ski'"),
        ({"decay": 0}, r"decay=0 .* \(0, 1\]"),
        ({"decay": 1.5}, r"decay=1.5 .* \(0, 1\]"),
        ({"decay": -0.5}, r"decay=-0.5 .* \(0, 1\]"),
        ({"decay": None, "learnable_decay": True}, "decay=None .* learnable_decay"),
        ({"ski_decay": 0.0}, r"ski_decay=0.0 .* \(0, 1\]"),
        ({"tno_type": "ski", "causal": False, "ski_rank": 65}, r"ski_rank=65 .* ski_grid_length=64"),
        ({"tno_type": "ski", "causal": False, "ski_rank": 1}, r"ski_rank=1 .* \[2, "),
        ({"tno_type": "rtf", "rtf_state_size": 64}, "rtf_state_size=64 .* below rtf_truncation_length=64"),
        ({"tno_type": "rtf", "rtf_num_denominators": 5}, "rtf_num_denominators=5 .* divisor of the GTU width 64"),
        ({"rtf_constraint": "l2"}, "rtf_constraint='l2' .* None, 'l1_montel'"),
        ({"fd_resolution": 100}, "fd_resolution=100 .* power of two"),
        ({"rpe_input": "sin"}, "rpe_input='sin' .* 'lag', 'normalized', 'sinusoidal'"),
        ({"fd_input": "sin"}, "fd_input='sin' .* 'omega', 'cos'"),
        ({"norm_type": "groupnorm"}, "norm_type='groupnorm' .* 'simplermsnorm'"),
        ({"norm_type": "batchnorm", "gtu_norm": True}, "gtu_norm=True .* False with a batch norm"),
        ({"rpe_norm_type": "batchnorm"}, "rpe_norm_type='batchnorm' .* None, 'simplermsnorm'"),
        ({"rpe_window": 0}, "rpe_window=0 .* at least 1"),
        ({"position_embedding": "rotary"}, "position_embedding='rotary' .* None, 'sinusoidal'"),
        ({"spatial_mixing": "both"}, "spatial_mixing='both' .* 'product', 'sum'"),
        ({"patch_size": 0}, "patch_size=0 .* at least 1"),
        ({"spatial_dims": 3}, "spatial_dims=3 .* one of 1, 2"),
        ({"spatial_dims": 2}, "causal=True .* False with spatial_dims=2"),
        (
            {"spatial_dims": 2, "causal": False, "max_position_embeddings": 65},
            "max_position_embeddings=65 .* a square",
        ),
        ({"tno_type": "ski", "spatial_dims": 2, "causal": False}, r"ski_rank=9 .* in \[2, ski_grid_length=8\]"),
        ({"norm_position": "middle"}, "norm_position='middle' .* 'pre', 'post', 'res_post'"),
        ({"hidden_act": "swosh"}, "hidden_act='swosh' .* 'silu'"),
        ({"classifier_pooling": "max"}, "classifier_pooling='max' .* None, 'last', 'mean'"),
        ({"hidden_size": 0}, "hidden_size=0 .* at least 1"),
        ({"rpe_layers": -1}, "rpe_layers=-1 .* at least 0"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob=1.0 .* \[0, 1\)"),
        ({"gtu_expansion": 0.01}, "gtu_expansion=0.01 .* at least 1"),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**{"tno_type": "rpe", "causal": True} | fields)


@pytest.mark.parametrize("head, causal", [(TnnForCausalLM, False), (TnnForMaskedLM, True)])
def test_refused_direction(head, causal):
    with pytest.raises(ValueError, match=f"causal={causal} .* {head.__name__} needs causal={not causal}"):
        head(tiny_config(causal=causal))


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForSequenceClassification])
@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": torch.tensor([[1, 99]])}, r"input_ids holds 99: .* vocab_size=99"),
        ({"input_ids": torch.tensor([[1, -1]])}, r"input_ids holds -1: .* vocab_size=99"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"input_ids must have shape \(B, L\), not \(3,\)"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, r"empty.*\(2, 0, 32\)"),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 4)},
            r"attention_mask has shape \(2, 4\).*\(2, 5\)",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 1, 5, 5)},
            r"attention_mask has shape \(2, 1, 5, 5\)",
        ),
        ({}, "Exactly one of input_ids and inputs_embeds"),
    ],
)
def test_refused_inputs(head, inputs, message):
    with pytest.raises(ValueError, match=message):
        seeded(head, tiny_config())(**inputs)
