"""Configurations of earlier versions: old names and values load as the new ones."""

import json

import pytest
from transformers import AutoConfig

from helpers.models import tiny_config
from modeling_tnn import TnnConfig

OLD = {"product": "plain", "tno_type": "free", "glu_dim": 48, "num_axes": 1, "axis_combination": "sum"}
NEW = {
    "tno_implementation": "eager",
    "tno_type": "explicit",
    "intermediate_size": 48,
    "spatial_dims": 1,
    "spatial_mixing": "sum",
}


def assert_new(config: TnnConfig):
    assert {name: getattr(config, name) for name in NEW} == NEW
    saved = config.to_dict()
    assert NEW.items() <= saved.items() and not {"product", "glu_dim", "num_axes", "axis_combination"} & saved.keys()


@pytest.mark.parametrize(
    "build", [TnnConfig, lambda **fields: TnnConfig.from_dict(fields)], ids=["class", "from_dict"]
)
def test_old_names(build):
    assert_new(build(**OLD))


def test_a_saved_configuration(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    for name in ("intermediate_size", "spatial_dims", "spatial_mixing", "tno_class"):
        del saved[name]
    file.write_text(json.dumps(saved | OLD))
    assert_new(AutoConfig.from_pretrained(tmp_path))
    overridden = AutoConfig.from_pretrained(tmp_path, glu_dim=24, product="chunked")
    assert (overridden.intermediate_size, overridden.tno_implementation) == (24, "fused")


def test_old_names_are_attributes():
    config = tiny_config()
    config.glu_dim, config.product, config.tno_type = 24, "plain", "free"
    assert (config.intermediate_size, config.tno_implementation, config.tno_type) == (24, "eager", "explicit")
    assert (config.glu_dim, config.product) == (24, "eager")


def test_old_values_are_checked():
    with pytest.raises(ValueError, match="`tno_implementation` must be one of 'auto', .*, 'triton', got 'fast'"):
        TnnConfig(product="fast")
