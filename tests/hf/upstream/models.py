"""transformers' tests of models, generation, configurations and training over every class and variant.

Run by `make test-hf`: not part of the usual tests.
"""

import unittest
import warnings
from unittest.mock import patch

import harness  # noqa: F401
import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor, random_attention_mask
from tests.test_training_mixin import TrainingTesterMixin

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import VARIANTS, tiny_config
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
    TnnPreTrainedModel,
)
from modeling_tnn.extensions import extensions
from modeling_tnn.tools.sequence_pairs import TnnForSequencePairClassification
from tests import test_modeling_common as common

# The tests look up by these tables, of the models in the library, which labels a class takes.
for table, model_class in {
    "MODEL_MAPPING_NAMES": TnnModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": TnnForCausalLM,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": TnnForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": TnnForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": TnnForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": TnnForQuestionAnswering,
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": TnnForMultipleChoice,
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES": TnnForSequencePairClassification,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": TnnForImageClassification,
}.items():
    setattr(common, table, {**getattr(common, table), "tnn": model_class.__name__})


class TextTester:
    """The tester of text models: small configurations, and inputs with padding anywhere."""

    batch_size, seq_length = 13, 7
    num_hidden_layers, hidden_size, vocab_size, num_labels, num_choices = 2, 32, 99, 3, 4
    is_training = True
    base_model_class, sequence_classification_class = TnnModel, TnnForSequenceClassification

    def __init__(self, fields):
        self.fields = fields
        self.num_hidden_layers = fields.get("num_hidden_layers", self.num_hidden_layers)
        self.causal_lm_class = TnnForCausalLM if fields["causal"] else None

    def get_config(self):
        return tiny_config(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        mask = random_attention_mask(shape)
        return self.get_config(), {"input_ids": ids_tensor(shape, self.vocab_size), "attention_mask": mask}


class ModelTests(ModelTesterMixin):
    """Common to all: no attention weights; every weight is made by `_init_weights`.

    Without `_torch_compile_train_cls`: that test wants one graph for a call with `position_ids`, but whether these are
    those of several documents is a question to the data, at which our graph breaks. `test_modeling.py` compiles.
    """

    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True
    fields = {}
    model_tester_class = TextTester

    def setUp(self):
        self.model_tester = self.model_tester_class(self.fields)
        properties = ["hidden_size", "num_hidden_layers"]
        self.config_tester = ConfigTester(self, TnnConfig, common_properties=properties, hidden_size=32)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_weights_reload_no_missing_tied_weights(self):
        """Without our guard: the file of this test holds nothing of the model, which we refuse to load."""
        with patch.object(extensions, "check_before_loading", lambda *_: None):
            super().test_model_weights_reload_no_missing_tied_weights()

    def test_bc_cache_name_forward(self):
        """With a warning in our place: both names are right with every release of transformers, so we warn of none."""
        forward = TnnPreTrainedModel.__call__

        def call(model, *args, **kwargs):
            if "past_key_values" in kwargs:
                warnings.warn("`past_key_values` is deprecated", FutureWarning, stacklevel=2)
            return forward(model, *args, **kwargs)

        with patch.object(TnnPreTrainedModel, "__call__", call):
            super().test_bc_cache_name_forward()

    def test_model_rope_scaling_from_config_1_dynamic(self):
        """Refused: what a causal model gives for the first tokens would depend on how many follow."""
        rope = {"rope_type": "dynamic", "factor": 10.0}
        with self.assertRaisesRegex(ValueError, "`rope_parameters` must be"):
            tiny_config(**HYBRIDS["full"] | {"rope_parameters": rope})

    def test_model_rope_with_partial_rotation(self):
        """Refused: heads turn as a whole."""
        rope = {"partial_rotary_factor": 0.5}
        with self.assertRaisesRegex(ValueError, "`rope_parameters` must be"):
            tiny_config(**HYBRIDS["full"] | {"rope_parameters": rope})

    def test_num_layers_is_small(self):
        """Two, but for a layer of each of three kinds."""
        if self.fields.get("num_hidden_layers") == 3:
            self.skipTest("layers of three kinds")
        super().test_num_layers_is_small()

    def test_can_load_ignoring_mismatched_shapes(self):
        """With biases of zero: the mean of three random ones, PyTorch's default, is above its bound now and then."""
        with patch.dict(self.model_tester.fields, initializer="normal"):
            super().test_can_load_ignoring_mismatched_shapes()


def of_rotary_positions(name):
    """A test of positions that a model has only where its configuration says so."""

    def test(self):
        if not self.fields.get("rope_parameters"):
            self.skipTest("no rotary positions")
        getattr(super(ModelTests, self), name)()

    return test


for scaling in ("0_linear", "2_yarn"):
    name = f"test_model_rope_scaling_from_config_{scaling}"
    setattr(ModelTests, name, of_rotary_positions(name))


class PairTester(TextTester):
    """Pairs of texts."""

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, 2, self.seq_length]
        mask = torch.stack([random_attention_mask([self.batch_size, self.seq_length]) for _ in range(2)], dim=1)
        return self.get_config(), {"input_ids": ids_tensor(shape, self.vocab_size), "attention_mask": mask}


class ImageTester(TextTester):
    """Images of 4 x 4 patches."""

    image_size, patch_size, num_channels = 8, 2, 3
    seq_length = (image_size // patch_size) ** 2

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.num_channels, self.image_size, self.image_size]
        return self.get_config(), {"pixel_values": floats_tensor(shape)}


def add_text_models(name, tno_type, causal, **fields):
    """Tests of the three classes of one variant."""
    head = TnnForCausalLM if causal else TnnForMaskedLM
    mixins = (GenerationTesterMixin, TrainingTesterMixin) if causal else ()
    members = {
        "all_model_classes": (TnnModel, head, TnnForSequenceClassification),
        "fields": {"tno_type": tno_type, "causal": causal, **fields},
        "model_tester": None,
        "__module__": __name__,
    }
    globals()[name] = type(name, (ModelTests, *mixins, unittest.TestCase), members)


for tno_type, causal in VARIANTS:
    name_of_test = f"Tnn{tno_type.title()}{'Causal' if causal else 'Bidirectional'}Test"
    # The text of `test_training_overfit` begins with the token 1, which generate would take for padding.
    add_text_models(name_of_test, tno_type, causal, pad_token_id=0)


for name, fields in HYBRIDS.items():
    for causal in (True, False):
        name_of_test = f"Tnn{name.title()}{'Causal' if causal else 'Bidirectional'}Test"
        add_text_models(name_of_test, "rpe", causal, pad_token_id=0, hidden_dropout_prob=0.0, **fields)


for name, fields in MIXED.items():
    # With a GLU, as in language models.
    fields = fields | {"use_glu": True, "pad_token_id": 0, "hidden_dropout_prob": 0.0}
    add_text_models(f"Tnn{name.title()}CausalTest", "rtf", True, **fields)


class TnnHeadsTest(ModelTests, unittest.TestCase):
    """Tags, answers and choices."""

    all_model_classes = (TnnForTokenClassification, TnnForQuestionAnswering, TnnForMultipleChoice)
    fields = {"causal": False}

    def test_export(self):
        """Without choices: the test gives them rows of one text. `test_ecosystem.py` exports them."""
        with patch.object(self, "all_model_classes", self.all_model_classes[:2]):
            super().test_export()


class TnnCausalHeadsTest(TnnHeadsTest):
    """The same in one direction."""

    fields = {"causal": True}


class TnnSequencePairTest(ModelTests, unittest.TestCase):
    """Two texts in one input."""

    all_model_classes = (TnnForSequencePairClassification,)
    fields = {"causal": False}
    model_tester_class = PairTester


class TnnImageTest(ModelTests, unittest.TestCase):
    """Pixels: no vocabulary to resize, no embeddings of tokens."""

    all_model_classes = (TnnForImageClassification,)
    fields = {"causal": False, "spatial_dims": 2, "max_position_embeddings": 16, "image_size": 8, "patch_size": 2}
    model_tester_class = ImageTester
    test_resize_embeddings = False

    def test_model_get_set_embeddings(self):
        """Patches are embedded by a convolution, not by a table: as in the vision models of the library."""
        model = TnnForImageClassification(self.model_tester.get_config())
        self.assertIs(model.get_input_embeddings(), model.model.patch_embedding)
        other = torch.nn.Identity()
        model.set_input_embeddings(other)
        self.assertIs(model.get_input_embeddings(), other)
        self.assertIsNone(model.get_output_embeddings())
