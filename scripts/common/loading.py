"""Load a configuration, a tokenizer or a model from a folder or the Hub for a program.

A folder may be damaged, or made to do harm. The libraries that read it raise errors of any type, with a message about
their own variables. Here every failure becomes an error of one line that names the files.
"""

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tnn_scripts.common.errors import UserError

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from modeling_tnn import TnnForMultipleChoice
from tnn_scripts.common.model_path import CONFIGS, TOKENIZERS

WEIGHTS = ("*.safetensors", "*.index.json", "*.bin")
# Class -> what it loads, and patterns of the files.
PARTS = {AutoConfig: ("configuration", CONFIGS), AutoTokenizer: ("tokenizer", (*TOKENIZERS, "chat_template*"))}
MODEL = ("model", (*CONFIGS, "generation_config.json", *WEIGHTS))
# Longer reasons are cut, such as a list of all models of transformers.
LONGEST = 500


def load(loader: type, source: str | Path, **options):
    """The object `loader.from_pretrained(source, **options)`, after it was used once.

    Raises:
        ValueError: it cannot be loaded or used.
        UserError: a file cannot be read or fetched, or a package is missing.
    """
    dtype = str(options.get("dtype", "auto")).removeprefix("torch.")
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"--dtype must be auto or a dtype of torch for weights, such as bfloat16, got {dtype}")
    with naming(source, *PARTS.get(loader, MODEL)):
        loaded = loader.from_pretrained(source, **options)
        if loader is AutoTokenizer:
            loaded.decode(loaded("a")["input_ids"])
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if isinstance(model, PreTrainedModel):
            model.config.return_dict = True  # the programs read outputs by name
            if model.config.model_type == "tnn" and model.main_input_name == "input_ids":
                check_output(model)  # other models may ask for more, as BART for an end of the text
        return loaded


def require_padding(tokenizer, option: str):
    """Let a tokenizer without a padding token pad with its end of text: the mask says what is padding.

    Raises:
        ValueError: it has neither.
    """
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        name = tokenizer.name_or_path
        raise ValueError(
            f"The tokenizer must have a padding token or an end of text with {option}, got that of {name}"
        )


def check_output(model: PreTrainedModel):
    """Let a TNN read one token, and refuse an output with NaN or infinity."""
    shape = (1, 1, 1) if isinstance(model, TnnForMultipleChoice) else (1, 1)
    ids = torch.zeros(shape, dtype=torch.long, device=model.device)
    with torch.no_grad():
        check_finite(model(ids, **{"use_cache": False} if model.config.causal else {})[0])


def check_writing(model: PreTrainedModel, source: str | Path):
    """Let a causal model write one token, and check the scores of every token that it writes from now on.

    Raises:
        ValueError: it cannot be written, such as for wrong fields of its generation_config.json.
    """
    model.register_forward_hook(lambda module, inputs, output: check_finite(output[0]))
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with naming(source, *MODEL):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)


def check_finite(output: torch.Tensor):
    # Not isfinite(): scores of minus infinity are tokens that a model never writes.
    if not output.amax(-1).isfinite().all():
        raise ValueError("the model's output is not finite: a weight is NaN or infinite, or too large for its dtype")


@contextmanager
def naming(source: str | Path, part: str, patterns: tuple[str, ...]) -> Iterator[None]:
    """Turn any failure of what reads `source` into an error of one line that names its files; see `load`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UserError):
        raise
    except BaseException as error:  # not Exception: the tokenizers library panics with other ones
        found = [file for pattern in patterns for file in Path(source).glob(pattern) if file.is_file()]
        broken = {file.name: fault for file in found if file.suffix == ".json" and (fault := fault_of(file))}
        names = ", ".join(broken or [file.name for file in found])
        kind = "" if isinstance(error, (ValueError, OSError, ImportError)) else f"{type(error).__name__}: "
        reason = "; ".join(broken.values()) or f"{kind}{error}"
        at = f" ({names})" if names else ""
        line = textwrap.shorten(f"The {part} of {source}{at} cannot be loaded: {reason}", LONGEST, placeholder=" ...")
        raise (UserError if isinstance(error, (OSError, ImportError)) else ValueError)(line) from error


def fault_of(file: Path) -> str:
    """What is wrong with a file that must hold a JSON object, or an empty text."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    return "" if isinstance(content, dict) else f"it must be a JSON object, got {type(content).__name__}"
