"""What the page and the API share: the model that they serve, and the address."""

import socket
from pathlib import Path

from tnn_scripts.common.errors import UserError

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.loading import check_writing, load
from tnn_scripts.data.vocabulary import check_vocabulary


def load_causal(name: str, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Raises:
        ValueError: it is no causal TNN, or its tokenizer is that of another model.
    """
    device = check_device(device)
    config = load(AutoConfig, name)
    if config.model_type != "tnn" or not config.causal:
        kind = "bidirectional TNN" if config.model_type == "tnn" else config.model_type
        raise ValueError(f"model={name} is a {kind}: only a causal TNN can be served.")
    tokenizer = load(AutoTokenizer, name)
    model = load(AutoModelForCausalLM, name, dtype=dtype).to(device)
    check_writing(model, name)
    check_vocabulary(tokenizer, model.config.vocab_size)
    return model.eval(), tokenizer


def name_of(model: str) -> str:
    """The name of a served model: that of its folder, or its id on the Hub."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def check_address(host: str | None, port: int | None):
    """Refuse an address that cannot be served, before the model is loaded.

    Raises:
        ValueError: the port is no number of a port.
        UserError: another program has it, or it is none of this machine.
    """
    if host is None or port is None:
        return
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be from 0 to {2**16 - 1}, got {port}")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UserError(f"--host {host} --port {port} cannot be served: {error.strerror or error}.") from error
