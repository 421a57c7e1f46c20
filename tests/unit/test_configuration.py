"""The configuration: presets, parameter counts, and what it refuses."""

import json
import re
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
from modeling_tnn.extensions import IMPLEMENTATIONS
from modeling_tnn.inputs import POOLINGS
from modeling_tnn.modeling_tnn import NORM_POSITIONS
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.tno_auto import COMBINATIONS
from modeling_tnn.tno_rpe import RPE_INPUTS
from modeling_tnn.tno_rtf import CONSTRAINTS, INITIAL_BOUNDS
from modeling_tnn.tno_s4d import DISCRETIZATIONS, INITIAL_MODES
from modeling_tnn.tno_ski import INITIAL_DEVIATIONS

README = (Path(__file__).parents[2] / "configuration" / "README.md").read_text()
PRESETS = sorted(path.parent for path in (Path(__file__).parents[2] / "configuration").glob("tnn-*/config.json"))
# Trainable parameters, counted in the released code (those of small models and with RTF: in ours).
PARAMETERS = {
    "tnn-tiny": 1_379_712,
    "tnn-small": 5_367_936,
    "tnn-bidirectional-small": 3_998_592,
    "tnn-causal-rtf": 49_190_400,
    "tnn-causal-hyena-rtf": 124_978_944,
    "tnn-causal-s4-rtf": 221_520_192,
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
    unknown = set(json.loads((folder / "config.json").read_text())) - {
        *TnnConfig().to_dict(),
        *TnnConfig.__annotations__,
        "num_labels",
    }
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
        "ski_initializer": INITIAL_DEVIATIONS,
        "s4d_initializer": INITIAL_MODES,
        "s4d_discretization": DISCRETIZATIONS,
        "classifier_pooling": {None: "by the direction"} | POOLINGS,
    }
    for name, table in tables.items():
        assert CHOICES[name] == tuple(table)


def test_the_docstring_has_all_fields():
    """Their types and defaults are in the signature."""
    described = re.findall(r"^        (\w+)(?: \(defaults to .*?\))?: ", TnnConfig.__doc__, flags=re.MULTILINE)
    token_ids = {"bos_token_id", "pad_token_id", "eos_token_id"}
    assert sorted(described) == sorted({*TnnConfig.__annotations__} - token_ids | {"ValueError"})


def test_derived_defaults():
    config = TnnConfig(hidden_size=48, max_position_embeddings=100, gtu_expansion=1.5)
    assert (config.intermediate_size, config.gtu_dim, config.fd_resolution) == (48, 72, 256)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"tno_type": "dct"},
            "`tno_type` must be .*one of 'rpe', 'fd', 'ski', 'rtf', 's4d', 'modal', 'explicit'.*, got 'dct'",
        ),
        ({"tno_type": "modal", "causal": False}, "`causal` must be .*True with tno_type='modal'.*, got False"),
        ({"tno_type": "ski", "causal": True}, "`causal` must be .*False with tno_type='ski'.*, got True"),
        ({"decay": 0}, r"`decay` must be .*\(0, 1\].*, got 0"),
        ({"decay": 1.5}, r"`decay` must be .*\(0, 1\].*, got 1.5"),
        ({"decay": -0.5}, r"`decay` must be .*\(0, 1\].*, got -0.5"),
        ({"decay": None, "learnable_decay": True}, "`decay` must be .*learnable_decay.*, got None"),
        ({"ski_decay": 0.0}, r"`ski_decay` must be .*\(0, 1\].*, got 0.0"),
        ({"tno_type": "ski", "causal": False, "ski_rank": 65}, r"`ski_rank` must be .*ski_grid_length=64.*, got 65"),
        ({"tno_type": "ski", "causal": False, "ski_rank": 1}, r"`ski_rank` must be .*\[2, .*, got 1"),
        (
            {"tno_type": "rtf", "rtf_state_size": 64},
            "`rtf_state_size` must be .*below rtf_truncation_length=64.*, got 64",
        ),
        (
            {"tno_type": "rtf", "rtf_num_denominators": 5},
            "`rtf_num_denominators` must be .*divisor of the GTU width 64.*, got 5",
        ),
        ({"tno_type": "s4d", "s4d_state_size": 7}, "`s4d_state_size` must be .*an even number.*, got 7"),
        ({"tno_type": "s4d", "s4d_dt_min": 0.5}, "`s4d_dt_min` must be .*at most s4d_dt_max=0.1.*, got 0.5"),
        ({"rtf_constraint": "l2"}, "`rtf_constraint` must be .*None, 'l1_montel'.*, got 'l2'"),
        ({"fd_resolution": 100}, "`fd_resolution` must be .*power of two.*, got 100"),
        ({"rpe_input": "sin"}, "`rpe_input` must be .*'lag', 'normalized', 'sinusoidal'.*, got 'sin'"),
        ({"fd_input": "sin"}, "`fd_input` must be .*'omega', 'cos'.*, got 'sin'"),
        ({"norm_type": "groupnorm"}, "`norm_type` must be .*'simplermsnorm'.*, got 'groupnorm'"),
        ({"norm_type": "batchnorm", "gtu_norm": True}, "`gtu_norm` must be .*False with a batch norm.*, got True"),
        ({"rpe_norm_type": "batchnorm"}, "`rpe_norm_type` must be .*None, 'simplermsnorm'.*, got 'batchnorm'"),
        ({"rpe_window": 0}, "`rpe_window` must be .*at least 1.*, got 0"),
        ({"position_embedding": "rotary"}, "`position_embedding` must be .*None, 'sinusoidal'.*, got 'rotary'"),
        ({"spatial_mixing": "both"}, "`spatial_mixing` must be .*'product', 'sum'.*, got 'both'"),
        ({"patch_size": 0}, r"`patch_size` must be in \[1, 16,777,216\], got 0"),
        ({"spatial_dims": 3}, "`spatial_dims` must be .*one of 1, 2.*, got 3"),
        ({"spatial_dims": 2}, "`causal` must be .*False with spatial_dims=2.*, got True"),
        (
            {"spatial_dims": 2, "causal": False, "max_position_embeddings": 65},
            "`max_position_embeddings` must be .*a square.*, got 65",
        ),
        (
            {"tno_type": "ski", "spatial_dims": 2, "causal": False},
            r"`ski_rank` must be .*in \[2, ski_grid_length=8\].*, got 9",
        ),
        ({"norm_position": "middle"}, "`norm_position` must be .*'pre', 'post', 'res_post'.*, got 'middle'"),
        ({"hidden_act": "swosh"}, "`hidden_act` must be .*'silu'.*, got 'swosh'"),
        ({"mlp_act": "swosh"}, "`mlp_act` must be .*'silu'.*, got 'swosh'"),
        ({"mlp_act": "silu", "use_glu": False}, "`mlp_act` must be None with use_glu=False, got 'silu'"),
        ({"classifier_act": "swosh"}, "`classifier_act` must be .*'silu'.*, got 'swosh'"),
        ({"classifier_pooling": "max"}, "`classifier_pooling` must be .*None, 'last', 'mean'.*, got 'max'"),
        ({"hidden_size": 0}, r"`hidden_size` must be in \[1, .*, got 0"),
        ({"rpe_layers": -1}, r"`rpe_layers` must be in \[0, 128\], got -1"),
        ({"hidden_dropout_prob": 1.0}, r"`hidden_dropout_prob` must be .*\[0, 1\).*, got 1.0"),
        ({"gtu_expansion": 0.01}, r"`gtu_expansion` must be .*in \[1, .*, got 0.01"),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**{"tno_type": "rpe", "causal": True} | fields)


@pytest.mark.parametrize("head, causal", [(TnnForCausalLM, False), (TnnForMaskedLM, True)])
def test_refused_direction(head, causal):
    with pytest.raises(ValueError, match=f"`causal` must be {not causal} for {head.__name__}, got {causal}"):
        head(tiny_config(causal=causal))


@pytest.mark.parametrize("head", [TnnModel, TnnForCausalLM, TnnForSequenceClassification])
@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": torch.tensor([[1, 99]])}, r"Entries of `input_ids` must be in \[0, vocab_size=99\), got 99"),
        ({"input_ids": torch.tensor([[1, -1]])}, r"Entries of `input_ids` must be in \[0, vocab_size=99\), got -1"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"`input_ids` must have shape \(B, L\), got \(3,\)"),
        (
            {"input_ids": torch.ones(2, 0, dtype=torch.long)},
            r"length of the sequence must be at least 1, got \(2, 0, 32\)",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 4)},
            r"`attention_mask` must have shape .* \(2, 5\), got \(2, 4\)",
        ),
        (
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 1, 5, 5)},
            r"`attention_mask` must have shape .*, got \(2, 1, 5, 5\)",
        ),
        ({}, "Exactly one of `input_ids` and `inputs_embeds` must be given, got none"),
    ],
)
def test_refused_inputs(head, inputs, message):
    with pytest.raises(ValueError, match=message):
        seeded(head, tiny_config())(**inputs)
