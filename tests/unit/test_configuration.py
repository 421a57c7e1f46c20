"""The configuration: presets, parameter counts, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from helpers.hybrids import hybrid_config
from helpers.models import VARIANTS, tiny_config
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
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
PRESETS = sorted(path.parent for path in (Path(__file__).parents[2] / "configuration").glob("*/config.json"))
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
    "hyenadna-small-32k": 3_277_568,
}
HEADS = {head.__name__: head for head in (TnnForCausalLM, TnnForMaskedLM, TnnForImageClassification)}


def test_presets():
    assert set(PARAMETERS) == {folder.name for folder in PRESETS}
    known = {*TnnConfig().to_dict(), *TnnConfig.__annotations__, "num_labels"}
    for folder in PRESETS:
        config = AutoConfig.from_pretrained(folder)
        assert isinstance(config, TnnConfig) and not set(json.loads((folder / "config.json").read_text())) - known
        with torch.device("meta"):
            model = HEADS[config.architectures[0]](config)
        count = model.num_parameters(only_trainable=True)
        assert count == PARAMETERS[folder.name], folder.name
        assert f"`{folder.name}`" in README and f"{count:,}" in README


def test_round_trip(tmp_path):
    """Saving and loading gives the same file, but for the code, which a loaded configuration does not carry."""
    set_fields = {"decay": 0.9, "learnable_decay": True, "intermediate_size": 24, "fd_resolution": 256}
    configs = [tiny_config(*variant, **set_fields) for variant in VARIANTS] + [hybrid_config("full", **set_fields)]
    for config in configs:
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


HYENA, S4 = {"toeplitz_mixer": "hyena"}, {"toeplitz_mixer": "s4"}
FULL, SLIDING = ({"layer_types": ["toeplitz", kind]} for kind in ("full_attention", "sliding_attention"))
SKI = {"tno_type": "ski", "causal": False}
RTF = {"tno_type": "rtf"}
# The field in the error, whose value it names at the end; what is allowed; and the fields.
REFUSED = [
    ("tno_type", "one of 'rpe', 'fd', 'ski', 'rtf', 's4d', 'modal', 'explicit', 'hyena'", {"tno_type": "dct"}),
    ("causal", "True with tno_type='modal'", {"tno_type": "modal", "causal": False}),
    ("causal", "False with tno_type='ski'", {"tno_type": "ski", "causal": True}),
    ("decay", r"\(0, 1\]", {"decay": 0}),
    ("decay", r"\(0, 1\]", {"decay": 1.5}),
    ("decay", r"\(0, 1\]", {"decay": -0.5}),
    ("decay", "learnable_decay", {"decay": None, "learnable_decay": True}),
    ("ski_decay", r"\(0, 1\]", {"ski_decay": 0.0}),
    ("ski_rank", "ski_grid_length=64", SKI | {"ski_rank": 65}),
    ("ski_rank", r"\[2, ", SKI | {"ski_rank": 1}),
    ("ski_rank", r"in \[2, ski_grid_length=8\]", SKI | {"spatial_dims": 2, "ski_rank": 9}),
    ("rtf_state_size", "below rtf_truncation_length=64", RTF | {"rtf_state_size": 64}),
    ("rtf_num_denominators", "divisor of the GTU width 64", RTF | {"rtf_num_denominators": 5}),
    ("rtf_constraint", "None, 'l1_montel'", {"rtf_constraint": "l2"}),
    ("s4d_state_size", "an even number", {"tno_type": "s4d", "s4d_state_size": 7}),
    ("s4d_dt_min", "at most s4d_dt_max=0.1", {"tno_type": "s4d", "s4d_dt_min": 0.5}),
    ("hyena_filter_emb_dim", r"an odd number in \[3, 1,023\]", {"hyena_filter_emb_dim": 4}),
    ("hyena_filter_inner_mlps", r"in \[0, 128\]", {"hyena_filter_inner_mlps": -1}),
    ("hyena_filter_freq", r"in \(0, 1000\]", {"hyena_filter_freq": 0}),
    ("hyena_filter_beyond", "one of 'error', 'zeros'", {"hyena_filter_beyond": "wrap"}),
    ("fd_resolution", "power of two", {"fd_resolution": 100}),
    ("rpe_input", "'lag', 'normalized', 'sinusoidal'", {"rpe_input": "sin"}),
    ("fd_input", "'omega', 'cos'", {"fd_input": "sin"}),
    ("norm_type", "'simplermsnorm'", {"norm_type": "groupnorm"}),
    ("gtu_norm", "False with a batch norm", {"norm_type": "batchnorm", "gtu_norm": True}),
    ("rpe_norm_type", "None, 'simplermsnorm'", {"rpe_norm_type": "batchnorm"}),
    ("rpe_window", "at least 1", {"rpe_window": 0}),
    ("position_embedding", "None, 'sinusoidal'", {"position_embedding": "rotary"}),
    ("spatial_mixing", "'product', 'sum'", {"spatial_mixing": "both"}),
    ("patch_size", r"in \[1, 16,777,216\]", {"patch_size": 0}),
    ("spatial_dims", "one of 1, 2", {"spatial_dims": 3}),
    ("causal", "False with spatial_dims=2", {"spatial_dims": 2, "causal": True}),
    ("max_position_embeddings", "a square", {"spatial_dims": 2, "causal": False, "max_position_embeddings": 65}),
    ("norm_position", "'pre', 'post', 'res_post'", {"norm_position": "middle"}),
    ("hidden_act", "'silu'", {"hidden_act": "swosh"}),
    ("mlp_act", "'silu'", {"mlp_act": "swosh"}),
    ("mlp_act", "None with use_glu=False", {"mlp_act": "silu", "use_glu": False}),
    ("classifier_act", "'silu'", {"classifier_act": "swosh"}),
    ("classifier_pooling", "None, 'last', 'mean'", {"classifier_pooling": "max"}),
    ("hidden_size", r"in \[1, ", {"hidden_size": 0}),
    ("rpe_layers", r"in \[0, 128\]", {"rpe_layers": -1}),
    ("hidden_dropout_prob", r"\[0, 1\)", {"hidden_dropout_prob": 1.0}),
    ("gtu_expansion", r"in \[1, ", {"gtu_expansion": 0.01}),
    ("toeplitz_mixer", "one of 'gtu', 'hyena', 's4'", {"toeplitz_mixer": "mamba"}),
    ("short_conv_kernel", r"in \[1, 64\]", {"short_conv_kernel": 0}),
    ("short_conv_kernel", "odd with causal=False", HYENA | {"causal": False, "short_conv_kernel": 4}),
    ("hyena_rank", r"in \[1, .*\] or None", {"hyena_rank": 0}),
    ("spatial_dims", "1 with toeplitz_mixer='hyena'", HYENA | {"causal": False, "spatial_dims": 2}),
    ("gtu_expansion", "1 with toeplitz_mixer='s4'", S4 | {"gtu_expansion": 2}),
    ("gtu_norm", "False with toeplitz_mixer='s4'", S4 | {"gtu_expansion": 1, "gtu_norm": True}),
    ("hyena_norm", "False with gtu_norm", HYENA | {"hyena_norm": True, "gtu_norm": True}),
    ("layer_types", "a list of 'toeplitz', ", {"layer_types": ["toeplitz", "mamba"]}),
    ("layer_types", "a list of num_hidden_layers=2 names", {"layer_types": ["toeplitz"]}),
    ("sliding_window", "an integer for layers of 'sliding_attention'", SLIDING | {"sliding_window": None}),
    ("sliding_window", r"in \[2, ", SLIDING | {"sliding_window": 1}),
    ("num_key_value_heads", "a divisor of 4 heads", FULL | {"num_attention_heads": 4, "num_key_value_heads": 3}),
    ("num_attention_heads", r"in \[1, ", FULL | {"num_attention_heads": 0}),
    ("head_dim", r"in \[1, ", FULL | {"head_dim": -1}),
    ("head_dim", "16,777,216 for 1048576 heads together", FULL | {"num_attention_heads": 2**20, "head_dim": 2**10}),
    ("head_dim", "even ", FULL | {"head_dim": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    ("rope_parameters", "None or have a rope_type of 'default'", FULL | {"rope_parameters": {"rope_type": "dynamic"}}),
    ("rope_parameters", "partial_rotary_factor", FULL | {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("rope_parameters", "'rope_theta'", FULL | {"rope_parameters": {"rope_theta": 0}}),
    ("rope_parameters", "'factor'", FULL | {"rope_parameters": {"rope_type": "linear"}}),
]


def test_refused_fields():
    for name, allowed, fields in REFUSED:
        value = "" if name == "rope_parameters" else re.escape(repr(fields[name]))  # it has been completed
        with pytest.raises(ValueError, match=f"`{name}` must be .*{allowed}.*, got {value}"):
            tiny_config(**fields)
    for head, causal in ((TnnForCausalLM, False), (TnnForMaskedLM, True)):
        with pytest.raises(ValueError, match=f"`causal` must be {not causal} for {head.__name__}, got {causal}"):
            head(tiny_config(causal=causal))
