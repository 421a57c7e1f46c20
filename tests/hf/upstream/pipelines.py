"""transformers' tests of pipelines over every class and variant, with small models that are made here.

Run by `make test-hf`: not part of the usual tests.
"""

import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import harness
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, ViTImageProcessor

from helpers.models import VARIANTS, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
)

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
SUMMARY = {
    head.__name__: {"tokenizer_classes": [PreTrainedTokenizerFast.__name__], "processor_classes": []}
    for head in (TnnModel, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnForTokenClassification)
}
SUMMARY["TnnForImageClassification"] = {"tokenizer_classes": [], "processor_classes": [ViTImageProcessor.__name__]}

# The tests read this when they are imported: which models there are, and by which tokenizers and processors they go.
with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRANSFORMERS_TINY_MODEL_PATH=folder):
    (Path(folder) / "reports").mkdir()
    (Path(folder) / "reports" / "tiny_model_summary.json").write_text(json.dumps(SUMMARY))
    from tests import test_pipeline_mixin as mixin

if not (harness.FOLDER / "pipelines").is_dir():
    for task, name in {
        "feature-extraction": "FeatureExtractionCheck",
        "fill-mask": "FillMaskCheck",
        "image-classification": "ImageClassificationCheck",
        "text-classification": "TextClassificationCheck",
        "text-generation": "TextGenerationCheck",
        "token-classification": "TokenClassificationCheck",
        "zero-shot": "ZeroShotCheck",
    }.items():
        mixin.pipeline_test_mapping[task] = {"test": f"pipeline_checks.{name}"}


def text_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([], vocab_size=261, special_tokens=list(SPECIAL.values()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)


class PipelineTests(mixin.PipelineTesterMixin):
    """Saves its models where the tests look for them."""

    fields = {}

    def __init_subclass__(cls):
        """Leaves out the tests of sounds, videos, tables and other tasks that no class here has."""
        super().__init_subclass__()
        tasks = {f"test_pipeline_{task.replace('-', '_')}" for task in cls.pipeline_model_mapping}
        for name in dir(cls):
            if name.startswith("test_pipeline_") and name.removesuffix("_fp16") not in tasks:
                setattr(cls, name, None)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = patch.object(mixin, "TRANSFORMERS_TINY_MODEL_PATH", folder.name)
        path.start()
        self.addCleanup(path.stop)
        for model_class in set(self.pipeline_model_mapping.values()):
            torch.manual_seed(0)
            target = Path(folder.name) / "tnn" / model_class.__name__
            model_class(self.config()).save_pretrained(target)
            self.processor().save_pretrained(target)

    def config(self):
        labels = {"id2label": {0: "entailment", 1: "contradiction"}, "label2id": {"entailment": 0, "contradiction": 1}}
        return tiny_config(vocab_size=261, eos_token_id=None, **labels, **self.fields)

    def processor(self):
        return text_tokenizer()


def add_text_pipelines(name, tno_type, causal):
    """Tests of the tasks of one variant."""
    mapping = {"feature-extraction": TnnModel}
    mapping |= {"text-generation": TnnForCausalLM} if causal else {"fill-mask": TnnForMaskedLM}
    mapping |= {"token-classification": TnnForTokenClassification}
    mapping |= dict.fromkeys(("text-classification", "zero-shot"), TnnForSequenceClassification)
    members = {"pipeline_model_mapping": mapping, "fields": {"tno_type": tno_type, "causal": causal}}
    globals()[name] = type(name, (PipelineTests, unittest.TestCase), members | {"__module__": __name__})


for tno_type, causal in VARIANTS:
    add_text_pipelines(f"Tnn{tno_type.title()}{'Causal' if causal else 'Bidirectional'}PipelineTest", tno_type, causal)


class TnnImagePipelineTest(PipelineTests, unittest.TestCase):
    """Pictures of any size, which the processor brings to that of the model."""

    pipeline_model_mapping = {"image-classification": TnnForImageClassification}
    fields = {"causal": False, "spatial_dims": 2, "max_position_embeddings": 16, "image_size": 8, "patch_size": 2}

    def processor(self):
        return ViTImageProcessor(size={"height": 8, "width": 8})
