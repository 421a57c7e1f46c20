"""Names on a command line: presets, recipes, files, folders and repositories of the Hub; and what they hold, loaded.

A name that can only be a path must exist: the Hub would be asked for it otherwise, which takes a minute without a
network and ends with an advice to check the connection. What checks a name imports nothing slow.

A folder may be damaged, or made to do harm. The libraries that read it raise errors of any type, with a message about
their own variables. In `load` every failure becomes an error of one line that names the files.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import NOTICES, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A repository of the Hub.
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
CONFIGS = ("config.json", "adapter_config.json")
# Patterns of the files that any tokenizer of transformers has one of.
TOKENIZERS = ("*token*.*", "vocab*.*", "*.model")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message: `; did you mean ...?` with the nearest known name, or a full stop."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def light_module(file: str) -> SimpleNamespace:
    """A file of `modeling_tnn` that imports nothing slow, without an import of the package, which takes seconds."""
    return SimpleNamespace(**run_path(Path(find_spec("modeling_tnn").origin).parent / file))


PRESETS = light_module("presets.py")
configuration_folder: Callable[[], Path] = PRESETS.configuration_folder


def preset_folders() -> dict[str, Path]:
    """The folder of each preset by its names: `lra/tnn-listops`, and its last part alone."""
    folders = PRESETS.preset_folders()
    return {folder.name: folder for folder in folders.values()} | folders


def recipe_files() -> dict[str, Path]:
    """The file of each recipe by its name: `wikitext2`, `lra/small-text`."""
    folder = configuration_folder() / "recipes"
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def find_config(name: str, option: str = "--config_name") -> str:
    """The folder of the preset called `name`; a folder or a Hub id as it is; ValueError for what can be neither."""
    presets = preset_folders()
    if name and Path(name).exists():
        return name
    if name in presets:
        return str(presets[name])
    folders = {preset.partition("/")[0] for preset in presets if "/" in preset}
    # Other names are those of the Hub, even if one is a little like that of a preset: t5-small.
    close = "/" not in name and get_close_matches(name, presets, 1, cutoff=0.9)
    if close or name.startswith("tnn-") or name.partition("/")[0] in folders:
        hint = did_you_mean(name, presets)
        raise ValueError(f"{option} must be a preset, folder or Hub id, got {name}{hint} `tnn presets` lists them.")
    check_path(name, option)
    return name


def find_recipe(name: str) -> Path:
    """The file of the recipe called `name`, or the file `name`; ValueError if there is neither."""
    recipes = recipe_files()
    if Path(name).is_file():
        return Path(name)
    if name not in recipes:
        hint = did_you_mean(name, recipes)
        raise ValueError(f"--recipe must be a recipe or a file, got {name}{hint} `tnn presets` lists them.")
    return recipes[name]


def check_path(name: str, option: str):
    """Check that a name is a folder or a file here, or could be the id of a repository."""
    path = Path(name)
    is_path = not HUB_ID.fullmatch(name) or name.startswith("outputs/") or ("/" in name and path.parent.is_dir())
    if name and path.exists():
        return
    if name and not is_path:
        return NOTICES.append(f"{name} is not a folder here: trying the Hub")
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, siblings, name.removesuffix("/").removesuffix(path.name))
    raise ValueError(f"{option} must be a folder or a Hub id, got {name!r}, which is not a folder here{hint}")


@cache
def try_hub():
    """Ask the Hub for an answer, and leave it alone if there is none: its client would try for a minute and more."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # those of its client differ by release
        constants.HF_HUB_OFFLINE = True
        sys.stderr.write(f"the Hub cannot be reached ({error}): only what was downloaded before is read\n")


def check_model_path(name: str | Path, option: str = "--model_name_or_path", tokenizer=False, causal=False):
    """Check that a name is a folder with a model, and with a `tokenizer`, or could be the id of a repository.

    With `causal`, a TNN must be one that continues texts.
    """
    name, folder = str(name), Path(name)
    check_path(name, option)
    if folder.is_file():
        raise ValueError(f"{option} must be a folder or a Hub id, got the file {name}")
    if not folder.is_dir():
        return
    if not any((folder / file).is_file() for file in CONFIGS):
        inside = sorted(str(file.parent) for file in folder.glob(f"*/{CONFIGS[0]}"))
        hint = f"; did you mean {' or '.join(inside[:3])}?" if inside else "."
        raise ValueError(f"{option} must be a folder with a model, got {name} without {CONFIGS[0]}{hint}")
    if causal and (folder / CONFIGS[0]).is_file() and not fault_of(folder / CONFIGS[0]):
        check_causal(name, json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8")))
    if tokenizer and not any(file.is_file() for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise ValueError(f"{option} must be a folder with a tokenizer, got {name} without tokenizer.json.")


# The ends of the names of classes, and what their models are called.
HEADS = {"MaskedLM": "a masked model", "Classification": "a classifier", "Prediction": "a model of series"}


def check_causal(name: str, config: dict):
    """Raise a ValueError for the configuration of a TNN that continues no texts."""
    heads = config.get("architectures")
    head = str(heads[0]) if heads and isinstance(heads, list) else "TnnModel"
    is_causal = head in ("TnnForCausalLM", "TnnModel") and config.get("causal", True)
    if config.get("model_type") == "tnn" and not is_causal:
        kind = next((kind for end, kind in HEADS.items() if head.endswith(end)), "no causal model")
        raise ValueError(f"{name} is {kind} ({head}): only a causal model, TnnForCausalLM, continues texts.")


WEIGHTS = ("*.safetensors", "*.index.json", "*.bin")
# Class -> what it loads, and patterns of the files.
PARTS = {"AutoConfig": ("configuration", CONFIGS), "AutoTokenizer": ("tokenizer", (*TOKENIZERS, "chat_template*"))}
MODEL = ("model", (*CONFIGS, "generation_config.json", *WEIGHTS))
# Longer reasons are cut, such as a list of all models of transformers.
LONGEST = 500


def load(loader: type, source: str | Path, **options):
    """The object `loader.from_pretrained(source, **options)`, after it was used once; errors of `naming`."""
    import torch
    from transformers import AutoTokenizer, PreTrainedModel

    dtype = str(options.get("dtype", "auto")).removeprefix("torch.")
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"--dtype must be auto or a dtype of torch for weights, such as bfloat16, got {dtype}")
    if not Path(source).exists():
        try_hub()
    with naming(source, *PARTS.get(loader.__name__, MODEL)):
        loaded = loader.from_pretrained(source, **options)
        if loader is AutoTokenizer:
            loaded.decode(loaded("a")["input_ids"])
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if isinstance(model, PreTrainedModel):
            model.config.return_dict = True  # the programs read outputs by name
            if model.config.model_type == "tnn" and model.main_input_name == "input_ids":
                # Other models may ask for more, as BART for an end of the text.
                shape = (1, 1, 1) if type(model).__name__ == "TnnForMultipleChoice" else (1, 1)
                ids = torch.zeros(shape, dtype=torch.long, device=model.device)
                with torch.no_grad():
                    check_finite(model(ids, **{"use_cache": False} if model.config.causal else {})[0])
        return loaded


def require_padding(tokenizer: "PreTrainedTokenizerBase", option: str):
    """Let a tokenizer without a padding token pad with its end of text, or raise a ValueError if it has neither."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        name = tokenizer.name_or_path
        raise ValueError(f"The tokenizer must have a token of padding or of the end with {option}, got that of {name}")


def check_writing(model: "PreTrainedModel", source: str | Path, options: dict):
    """Let a causal model write a token with `options` of `generate`, and check all scores from now on."""
    model.register_forward_hook(lambda module, inputs, output: check_finite(output[0]))
    ids = model.dummy_inputs["input_ids"][:1, :1].to(model.device) * 0
    with naming(source, *MODEL):
        model.generate(ids, attention_mask=ids + 1, max_new_tokens=1, **options)


def check_finite(output: "torch.Tensor"):
    # Not isfinite(): scores of minus infinity are tokens that a model never writes.
    if not output.amax(-1).isfinite().all():
        raise ValueError("the model's output is not finite: a weight is NaN or infinite, or too large for its dtype")


@contextmanager
def naming(source: str | Path, part: str, patterns: tuple[str, ...]) -> Iterator[None]:
    """Turn any failure of what reads `source` into an error of one line that names its files.

    A ValueError, or a UserError where a file cannot be read or fetched, or a package is missing.
    """
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
    """Return the fault of a file that must hold a JSON object, or an empty string."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    return "" if isinstance(content, dict) else f"it must be a JSON object, got {type(content).__name__}"


def check_device(name: str | None) -> str:
    """The name of a device that this machine has: the accelerator if there is one, else the CPU, unless given."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be a device of this machine, got {name}: {reason}") from error
    return name


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int):
    """Check that a model has an embedding for every id of its tokenizer. Without one, a GPU would end the process."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= vocab_size:
        raise ValueError(
            f"Ids of the tokenizer must be below vocab_size={vocab_size} of the model, got {highest} for {token!r}."
            f" It has {len(tokenizer)} tokens."
        )
