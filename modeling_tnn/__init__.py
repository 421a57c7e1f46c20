"""Toeplitz neural networks for Hugging Face transformers. Importing the package registers the Auto classes.

Names that need transformers' model code are imported on first use, so that `import modeling_tnn` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .auto_classes import register
from .compile.product import keep_products
from .configuration_tnn import TnnConfig
from .extensions import extensions
from .presets import list_presets, load_preset
from .tno import ToeplitzOperator
from .tno_auto import register_operator
from .toeplitz import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul

if TYPE_CHECKING:
    from .compile.decoding_step import DecodingStep
    from .modeling_tnn import (
        TnnForAudioClassification,
        TnnForCausalLM,
        TnnForImageClassification,
        TnnForMaskedLM,
        TnnForMultipleChoice,
        TnnForQuestionAnswering,
        TnnForSequenceClassification,
        TnnForTimeSeriesPrediction,
        TnnForTokenClassification,
        TnnModel,
        TnnPreTrainedModel,
    )
    from .parallel.sequence import SequenceParallel
    from .serving.scheduler import BatchScheduler
    from .tools.comparing import evaluate_by_length, match_parameters, plot_by_length, state_bytes_by_length
    from .tools.embedding import embed_texts
    from .tools.layout import to_column_major
    from .tools.poles import PoleCallback, find_unstable, project_poles

__version__ = "0.1.0"

__all__ = [
    "BatchScheduler",
    "DecodingStep",
    "PoleCallback",
    "SequenceParallel",
    "TnnConfig",
    "TnnForAudioClassification",
    "TnnForCausalLM",
    "TnnForImageClassification",
    "TnnForMaskedLM",
    "TnnForMultipleChoice",
    "TnnForQuestionAnswering",
    "TnnForSequenceClassification",
    "TnnForTimeSeriesPrediction",
    "TnnForTokenClassification",
    "TnnModel",
    "TnnPreTrainedModel",
    "ToeplitzOperator",
    "causal_toeplitz_matmul",
    "dense_toeplitz",
    "embed_texts",
    "evaluate_by_length",
    "find_unstable",
    "keep_products",
    "list_presets",
    "load_preset",
    "match_parameters",
    "plot_by_length",
    "project_poles",
    "register_operator",
    "state_bytes_by_length",
    "to_column_major",
    "toeplitz_matmul",
]

# Module -> names that are imported from it on first use.
_LATER = {
    "compile.decoding_step": ["DecodingStep"],
    "modeling_tnn": [name for name in __all__ if name.startswith("Tnn") and name != "TnnConfig"],
    "parallel.sequence": ["SequenceParallel"],
    "serving.scheduler": ["BatchScheduler"],
    "tools.comparing": ["evaluate_by_length", "match_parameters", "plot_by_length", "state_bytes_by_length"],
    "tools.embedding": ["embed_texts"],
    "tools.layout": ["to_column_major"],
    "tools.poles": ["PoleCallback", "find_unstable", "project_poles"],
}

# Modules that register functions with the core, see `extensions.py`. `compile` has more, imported here already.
_REGISTERING = "compile.static_cache kernels.loss kernels.stacking parallel.tensor tools.checks tools.operator_code"
_REGISTERING += " tools.recurrent"
extensions.modules = [f"{__name__}.{name}" for name in _REGISTERING.split()]

register()


def __getattr__(name: str):
    for module, names in _LATER.items():
        if name == module or name in names:
            imported = import_module(f".{module}", __name__)
            return imported if name == module else getattr(imported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
