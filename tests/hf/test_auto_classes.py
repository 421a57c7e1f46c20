"""The Auto classes know the models before their code is imported."""

import sys

from helpers import processes

BEGIN = """import sys, modeling_tnn
assert 'transformers.modeling_utils' not in sys.modules
import transformers
"""
CHECKS = """
config = modeling_tnn.TnnConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9)
model = transformers.AutoModelForCausalLM.from_config(config)
assert type(model) is modeling_tnn.TnnForCausalLM is modeling_tnn.modeling_tnn.TnnForCausalLM

from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForImageClassification
config, image = modeling_tnn.TnnConfig, modeling_tnn.TnnForImageClassification
assert AutoModel._model_mapping[modeling_tnn.TnnConfig] is modeling_tnn.TnnModel
assert modeling_tnn.TnnForMaskedLM in AutoModelForMaskedLM._model_mapping.values()
assert (config, image) in AutoModelForImageClassification._model_mapping.items()

class Config(transformers.PreTrainedConfig):
    model_type = "other"
class Model(transformers.PreTrainedModel):
    config_class = Config
transformers.AutoModel.register(Config, Model)
assert transformers.AutoModel._model_mapping[Config] is Model

import pickle
mapping = pickle.loads(pickle.dumps(transformers.AutoModel._model_mapping))
assert mapping[modeling_tnn.TnnConfig] is modeling_tnn.TnnModel

# Another release of transformers.
from modeling_tnn import auto_classes
del transformers.AutoModel._model_mapping._extra_content[modeling_tnn.TnnConfig]
class Mapping(type(transformers.AutoModel._model_mapping)):
    _extra_content = property(lambda self: None)
    def register(self, key, value, exist_ok=False):
        self.registered = (key, value)
transformers.AutoModel._model_mapping.__class__ = Mapping
auto_classes.register()
assert transformers.AutoModel._model_mapping.registered == (modeling_tnn.TnnConfig, modeling_tnn.TnnModel)
"""


def test_models_are_imported_when_asked_for():
    processes.run([sys.executable, "-c", BEGIN + CHECKS], check=True)
