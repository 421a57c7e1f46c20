"""The model of the programs that write texts."""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.loading import check_writing, load
from tnn_scripts.data.vocabulary import check_vocabulary


def load_writer(
    name: str, dtype: str, device: str | None, trust_remote_code: bool = False, **tokenizing
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer with the options `tokenizing`; ValueError if they do not fit."""
    device, code = check_device(device), {"trust_remote_code": trust_remote_code}
    tokenizer = load(AutoTokenizer, name, **code, **tokenizing)
    model = load(AutoModelForCausalLM, name, dtype=dtype, **code).to(device)
    check_writing(model, name)
    check_vocabulary(tokenizer, model.config.vocab_size)
    return model.eval(), tokenizer


def load_causal(name: str, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal TNN and its tokenizer, for a server; ValueError if it is another model."""
    config = load(AutoConfig, name)
    if config.model_type != "tnn" or not config.causal:
        kind = "bidirectional TNN" if config.model_type == "tnn" else config.model_type
        raise ValueError(f"model={name} is a {kind}: only a causal TNN can be served.")
    return load_writer(name, dtype, device)


def name_of(model: str) -> str:
    """The name of a served model: that of its folder, or its id on the Hub."""
    return Path(model).resolve().name if Path(model).is_dir() else model
