"""What the programs that write texts share: the model that they load, and the address where it is served."""

import socket
from pathlib import Path

from tnn_scripts.common.errors import UserError

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.loading import check_writing, load
from tnn_scripts.data.vocabulary import check_vocabulary


def load_writer(
    name: str, dtype: str, device: str | None, trust_remote_code: bool = False, **tokenizing
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer with the options `tokenizing`.

    Raises:
        ValueError: the device is wrong, the model writes nothing, or its tokenizer is that of another model.
    """
    device, code = check_device(device), {"trust_remote_code": trust_remote_code}
    tokenizer = load(AutoTokenizer, name, **code, **tokenizing)
    model = load(AutoModelForCausalLM, name, dtype=dtype, **code).to(device)
    check_writing(model, name)
    check_vocabulary(tokenizer, model.config.vocab_size)
    return model.eval(), tokenizer


def load_causal(name: str, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal TNN and its tokenizer, for a server.

    Raises:
        ValueError: it is another model, or one that `load_writer` refuses.
    """
    config = load(AutoConfig, name)
    if config.model_type != "tnn" or not config.causal:
        kind = "bidirectional TNN" if config.model_type == "tnn" else config.model_type
        raise ValueError(f"model={name} is a {kind}: only a causal TNN can be served.")
    return load_writer(name, dtype, device)


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
