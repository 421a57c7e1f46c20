"""Small models and texts for the tests, and how far two tensors are apart."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from modeling_tnn import (
    TnnConfig,
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.tno_auto import OPERATORS

CAUSAL = [name for name, cls in OPERATORS.items() if cls.supports_causal]
BIDIRECTIONAL = [name for name, cls in OPERATORS.items() if cls.supports_bidirectional]
VARIANTS = [(tno_type, True) for tno_type in CAUSAL] + [(tno_type, False) for tno_type in BIDIRECTIONAL]

# Heads of real values: the class, its fields and the name of its input.
VALUES = {
    "series": (TnnForTimeSeriesPrediction, {"input_channels": 3, "prediction_length": 4}, "past_values"),
    "audio": (TnnForAudioClassification, {"input_channels": 1}, "input_values"),
    "positions": (TnnForTokenClassification, {"input_channels": 3}, "input_values"),
}


def values_with_gaps(rows: int, length: int, channels: int) -> torch.Tensor:
    """Random values `(rows, length, channels)`, of which every seventh is missing."""
    values = torch.randn(rows, length, channels, generator=torch.Generator().manual_seed(length))
    values.view(-1)[::7] = torch.nan
    return values


def tiny_config(tno_type="rpe", causal=True, **fields) -> TnnConfig:
    """The configuration of a model of two layers without trivial values of fields."""
    defaults = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "gtu_expansion": 2,
        "max_position_embeddings": 64,
        "rpe_dim": 16,
        "rpe_layers": 2,
        "ski_rank": 9,
        "ski_filter_size": 5,
        "rtf_state_size": 8,
        "num_modes": 5,
        "modal_window": 3,
        "rtf_num_denominators": 4,
        "rtf_constraint": "l1_montel",
        "rtf_initializer": "montel",
        "s4d_state_size": 6,
        "hyena_filter_order": 8,
        "hyena_filter_inner_mlps": 1,
        "hyena_filter_beyond": "zeros",
    }
    return TnnConfig(tno_type=tno_type, causal=causal, **defaults | fields)


# How far outputs of a loaded model may be from those of the saved one, whose weights are equal bit for bit: tensors of
# a file are not aligned in memory, and some CPUs then round products in another order.
UNALIGNED = 3e-6


def slow(*values) -> list:
    """Parameters that `make test-slow` adds to those of the usual tests."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in values]


def seeded(build, *args, **kwargs):
    """`build(*args, **kwargs)` in evaluation mode, with the same random weights every time."""
    torch.manual_seed(0)
    return build(*args, **kwargs).eval()


def lively_language_model(**fields) -> TnnForCausalLM:
    """A float64 model whose next token depends on the text: untied and with a loud mixer, it does not repeat one."""
    config = tiny_config(eos_token_id=None, tie_word_embeddings=False, **fields)
    model = seeded(TnnForCausalLM, config).double()
    with torch.no_grad():
        for layer in model.model.layers:
            mixer = layer.attention if layer.mixer is None else layer.mixer
            for name in ("v_proj", "in_proj", "o_proj"):  # those that the mixer has
                if hasattr(mixer, name):
                    getattr(mixer, name).weight.mul_(4)
            if layer.attention is not None:
                mixer.q_proj.weight.mul_(4)  # the mean of all tokens would change little from one to the next
    return model


def checkpoint_activations(model, options: dict | None = None):
    """By the name that the installed transformers has for it; 5.17 knows the old one only."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(options)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute entry of `expected`, or over `scale`."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    scale = scale or expected.abs().max().double().item() or 1.0
    return (actual.double() - expected.double()).abs().max().item() / scale


def random(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def two_sided(kernel: torch.Tensor) -> torch.Tensor:
    """A causal kernel `(D, L)` as coefficients `(D, 2L - 1)`, zero at negative lags."""
    return torch.nn.functional.pad(kernel, (kernel.shape[1] - 1, 0))


def padded(text: torch.Tensor, left: int, right: int) -> dict[str, torch.Tensor]:
    """`text` `(L,)` as a batch of one with random tokens, not only the padding token, around it."""
    before, after = torch.randint(99, (left,)), torch.randint(99, (right,))
    mask = torch.tensor([0] * left + [1] * len(text) + [0] * right)
    return {"input_ids": torch.cat([before, text, after])[None], "attention_mask": mask[None]}


def image_config(tno_type="rpe", **fields):
    defaults = {"image_size": 24, "patch_size": 4, "max_position_embeddings": 36, "spatial_dims": 2, "num_labels": 3}
    defaults |= {"spatial_mixing": "sum", "ski_rank": 4, "rtf_state_size": 4, "hidden_dropout_prob": 0.0}
    return tiny_config(tno_type, False, **defaults | fields)


AUTO = {
    TnnModel: AutoModel,
    TnnForCausalLM: AutoModelForCausalLM,
    TnnForMaskedLM: AutoModelForMaskedLM,
    TnnForSequenceClassification: AutoModelForSequenceClassification,
    TnnForTokenClassification: AutoModelForTokenClassification,
    TnnForQuestionAnswering: AutoModelForQuestionAnswering,
    TnnForMultipleChoice: AutoModelForMultipleChoice,
}


INPUT_IDS = torch.arange(22).view(2, 11) * 4


def perturbed_model(head, tno_type, causal, **fields):
    """A model of which every parameter differs from its initial value."""
    model = seeded(head, tiny_config(tno_type, causal, norm_type="gatedrmsnorm", learnable_decay=True, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


class RandomTexts(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(99, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}
