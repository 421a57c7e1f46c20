"""Toeplitz neural networks for Hugging Face transformers. Importing this registers them with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from .configuration_tnn import TnnConfig
from .modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
    TnnPreTrainedModel,
)
from .stability import PoleCallback, find_unstable, project_poles
from .tno import ToeplitzOperator
from .tno_auto import register_operator
from .toeplitz import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul

__version__ = "0.1.0"

AutoConfig.register(TnnConfig.model_type, TnnConfig, exist_ok=True)
AutoModel.register(TnnConfig, TnnModel, exist_ok=True)
AutoModelForCausalLM.register(TnnConfig, TnnForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(TnnConfig, TnnForMaskedLM, exist_ok=True)
AutoModelForImageClassification.register(TnnConfig, TnnForImageClassification, exist_ok=True)
AutoModelForSequenceClassification.register(TnnConfig, TnnForSequenceClassification, exist_ok=True)

__all__ = [
    "PoleCallback",
    "TnnConfig",
    "TnnForCausalLM",
    "TnnForImageClassification",
    "TnnForMaskedLM",
    "TnnForSequenceClassification",
    "TnnModel",
    "TnnPreTrainedModel",
    "ToeplitzOperator",
    "causal_toeplitz_matmul",
    "dense_toeplitz",
    "find_unstable",
    "project_poles",
    "register_operator",
    "toeplitz_matmul",
]
