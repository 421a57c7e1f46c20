"""Convert a checkpoint of the released implementations, and report where each tensor goes."""

import argparse
import io
import json
import pickle
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file

from modeling_tnn.configuration_tnn import TnnConfig
from tnn_programs.original.architectures import ARCHITECTURES, HEADS, Architecture, operator_of
from tnn_programs.original.names import BOOKKEEPING, heads_together, our_layout, our_name

# Prefixes of the modules of each head; the body is under `model.`, or has no prefix without a head.
HEAD_MODULES = {"base": (), "causal-lm": ("lm_head.",), "masked-lm": ("transform.", "lm_head.")}
HEAD_MODULES |= dict.fromkeys(("sequence-classification", "sequence-pair-classification"), ("classifier.",))
ALL_HEADS = ("transform.", "lm_head.", "classifier.")
EMBEDDING = "embed_tokens.weight"
LEFT_OUT = {
    BOOKKEEPING: "a version number, bytes of an FP8 library, or rotary frequencies",
    r"tno\.decay_logit$": "a fixed decay is a field of the configuration",
    r"^lm_head\.weight$": "tied to the input embedding",
    r"^embed_tokens\.bias$": "added to each row of the embedding",
    r"implicit_filter\.\d+\.freq$": "another name of the parameter that all sines share",
    "": "part of another head (option head)",
}
# Ends of the names of tensors that are several parameters here, and the ends of these.
PARTS = {
    ".ab": (".denominator", ".numerator"),
    ".qkv.weight": (".q_proj.weight", ".k_proj.weight", ".v_proj.weight"),
    "mixer_norm.weight": ("mixer_norm.weight", "attention_norm.weight"),
}

# The files that a folder of the Hub may have, the safest first, and pieces of a file, which are numbered.
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "weights.ckpt", "*.pt", "*.pt.part*")
PART = re.compile(r"(?s)(.+)\.part(\d+)")


def fetch(repo_id: str) -> Path:
    """The folder of a repository of the Hub, with `config.json` and the safest of its `WEIGHTS`."""
    for weights in WEIGHTS:
        folder = Path(snapshot_download(repo_id, allow_patterns=["config.json", weights]))
        if any(folder.glob(weights)):
            break
    return folder


def file_in(folder: Path) -> Path:
    """The weights in a folder of the Hub, perhaps a file in parts; ValueError if not one, or without `config.json`."""
    found = next((files for name in WEIGHTS if (files := [*folder.glob(name)])), [])
    files = {PART.sub(r"\1", file.name) for file in found}
    if len(files) != 1 or not (folder / "config.json").exists():
        named = f"{folder} with {', '.join(sorted(files)) or 'none'}"
        raise ValueError(f"The folder must hold config.json and one of {', '.join(WEIGHTS)}, got {named}")
    return folder / files.pop()


def join(path: Path, scratch: Path | None) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the options in the parts of a file, by its name or that of one; ValueError if one is missing."""
    whole = PART.sub(r"\1", path.name)
    named = {file: PART.fullmatch(file.name) for file in path.parent.glob("*.part*")}
    parts = {int(name[2]): file for file, name in named.items() if name and name[1] == whole}
    if missing := set(range(max(parts, default=0) + 1)).difference(parts):
        raise ValueError(f"The checkpoint must be a file or have all parts, got no {whole}.part{min(missing)}")
    with tempfile.TemporaryDirectory(prefix=".parts-", suffix=".partial", dir=scratch) as folder:
        with Path(folder, whole).open("wb") as joined:
            for number in sorted(parts):
                with parts[number].open("rb") as part:
                    shutil.copyfileobj(part, joined, 2**24)
        return read_file(Path(folder, whole))


def read_checkpoint(path: Path, scratch: Path | None = None) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the options in a file, its parts or a folder of the Hub, whose `config.json` has the options.

    Tensors are mapped from the file: they are read when they are used. Parts are joined in a file in the folder
    `scratch`, by default that of the system, which takes space until the tensors are gone, without a name. A
    ValueError if the file is of another kind, damaged, or a pickle with other objects than tensors and options.
    """
    if path.is_dir():
        file, options = file_in(path), json.loads((path / "config.json").read_text(encoding="utf-8"))
        return read_checkpoint(file, scratch)[0], options | options.pop("layer", {})
    return join(path, scratch) if PART.fullmatch(path.name) or not path.exists() else read_file(path)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and the options in one file; see `read_checkpoint`."""
    if path.suffix not in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise ValueError(
            f"The checkpoint must be a .safetensors, .pt, .pth, .bin or .ckpt file, got {path}. A folder of this "
            "package needs no conversion: `from_pretrained` and the commands load it."
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path), {}
        # fairseq stores its options in a Namespace, an FP8 library its state as bytes. These run no code when read.
        with torch.serialization.safe_globals([argparse.Namespace, io.BytesIO]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # A damaged file may raise any of these.
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, LookupError) as error:
        raise ValueError(
            f"{path} is refused: it is damaged, or it holds objects other than tensors and options, and reading these "
            f"would run code. If you trust the file, save its tensors as .safetensors. {str(error)[:200]}"
        ) from error
    state = content
    if isinstance(content, dict):
        state = next((content[name] for name in ("model", "state_dict") if name in content), content)
    if not isinstance(state, dict):
        raise ValueError(f"{path} must hold the tensors of a model by their names, got {type(state).__name__}")
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if short := [name for name, one in tensors.items() if one.is_meta or one.untyped_storage().nbytes() < one.nbytes]:
        raise ValueError(f"{path} must hold all numbers of a tensor, got fewer for {short[0]}")
    return tensors, options_of(content)


def options_of(content: dict) -> dict:
    """The options in a fairseq checkpoint: `args`, or `cfg` with those of the task and of the model."""
    cfg, found = content.get("cfg"), {}
    cfg = cfg if isinstance(cfg, dict) else {}
    for part in (cfg.get("task"), cfg.get("model"), content.get("args")):
        found |= vars(part) if isinstance(part, argparse.Namespace) else part if isinstance(part, dict) else {}
    return found


def rename(tensors: dict[str, torch.Tensor], names: tuple) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors by their names here, the body without a prefix, and their official names; ValueError if two meet."""
    renamed, official_names = {}, {}
    for official, value in tensors.items():
        if BOOKKEEPING.search(official):
            continue
        name = our_name(official, names).removeprefix("model.")
        # A stand-alone layer of tnn-pytorch has no prefix.
        name = f"layers.0.{name}" if name.startswith(("mixer.", "glu.", "mixer_norm.", "glu_norm.")) else name
        if name in renamed:
            both = f"{official_names[name]} and {official}"
            raise ValueError(f"The tensors must have different names after the conversion, got {name} for {both}")
        renamed[name], official_names[name] = our_layout(official, value), official
    return renamed, official_names


def take_decay(tensors: dict, options: dict, num_layers: int) -> dict:
    """The decay fields of the configuration. Fixed decays are not parameters here, so they are taken out of `tensors`.

    A ValueError if layers have no fixed decay although the options say so, or others have one, or they differ.
    """
    if options.get("use_multi_decay"):
        return {"decay": options.get("gamma", 0.99), "learnable_decay": True}
    names = {layer: f"layers.{layer}.mixer.tno.decay_logit" for layer in range(num_layers)}
    stored = {layer: tensors.pop(name).flatten() for layer, name in names.items() if name in tensors}
    # The released FD operator accepts the option and has no decay.
    declared = options.get("use_decay") and operator_of(options) != "fd"
    if (declared or stored) and (missing := names.keys() - stored.keys()):
        layers = f"the layers {', '.join(map(str, sorted(missing)))}"
        rule = "The checkpoint must hold the decay, `gamma`, of each layer (option use_decay)"
        raise ValueError(f"{rule}, got none for {layers}")
    if not stored:
        return {"decay": None}
    values = torch.cat([*stored.values()]).unique().tolist()
    if len(values) > 1:
        raise ValueError(f"gamma must be one decay, or learned (option use_multi_decay), got {values[:4]}")
    return {"ski_decay" if operator_of(options) == "ski" else "decay": values[0]}


def arrange_operators(tensors: dict, config: TnnConfig, num_heads: int):
    """Rearrange the parameters of RTF and FD operators into their form here, in place."""
    for name in [name for name in tensors if name.endswith("tno.ab")]:
        stem = name.removesuffix("ab")
        both, filters = tensors.pop(name), len(tensors[f"{stem}direct"])  # (A + filters, N)
        tensors[f"{stem}denominator"], tensors[f"{stem}numerator"] = both[:-filters], both[-filters:]
    if config.tno_types == ["fd"] and not config.causal:
        for name in [name for name in tensors if ".tno.rpe.out.linear." in name]:
            tensors[name] = heads_together(tensors[name], num_heads)


def warnings_of(config: TnnConfig) -> list[str]:
    """Warnings about intended differences between the converted and the released model."""
    longest = config.fd_resolution
    fd = (
        f"The frequency grid of the released code grows with the input. Here it is that of inputs of "
        f"{longest // 2 + 1} to {longest} tokens, with which outputs agree (option tokens_per_sample)."
    )
    published = "SKI interpolates as published: outputs differ from those of the released code."
    ski = (
        f"The inducing points of the released code spread over each input. Here they spread over "
        f"{config.ski_grid_length} tokens, for which outputs agree (option tokens_per_sample). Its interpolation "
        f"fades after two or three tokens; the option published_ski takes the published one instead."
    )
    found = {"fd": fd, "ski": published if config.ski_interpolation == "linear" else ski}
    return [found[name] for name in config.tno_types if name in found]


def name_in_model(name: str, head: str) -> str:
    """The name of a parameter in a model with a `head`, whose body has a prefix."""
    return name if head == "base" or name.startswith(ALL_HEADS) else f"model.{name}"


def destinations(tensors: dict, official_names: dict, converted: dict, head: str) -> dict[str, str]:
    """For each official tensor its name in the model, or why it has none."""
    names, went = {official: name for name, official in official_names.items()}, {}
    for official in tensors:
        name = names.get(official, official)
        found = ([name.removesuffix(end) + one for one in ours] for end, ours in PARTS.items() if name.endswith(end))
        parts = next(found, [name])
        reason = next(why for pattern, why in LEFT_OUT.items() if re.search(pattern, name))
        became = ", ".join(name_in_model(part, head) for part in parts if part in converted)
        went[official] = became or f"left out: {reason}"
    return went


def build_config(tensors: dict, options: dict, built: Architecture, published_ski: bool) -> TnnConfig:
    """The configuration of the weights and the options. It takes fixed decays and tied weights out of `tensors`."""
    found = built.sizes(tensors)
    fields = built.fields(options, found) | take_decay(tensors, options, found["num_hidden_layers"])
    projection = tensors.get("lm_head.weight")
    fields["tie_word_embeddings"] = projection is None or torch.equal(projection, tensors[EMBEDDING])
    if fields["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    fields["ski_interpolation"] = "linear" if published_ski else "released"
    found.pop("gtu_dim")
    if (classes := tensors.get("classifier.out_proj.weight")) is not None:
        fields["num_labels"] = len(classes)
    return TnnConfig(**found | fields)


def convert(tensors: dict, options: dict, architecture: str, head: str | None = None, published_ski: bool = False):
    """The model of a checkpoint, and a report with the destination of each official tensor and warnings.

    `tensors` have official names, `options` differ from the defaults of the architecture, and `published_ski` lets SKI
    interpolate as published, not as released. A ValueError if they do not fit each other, or cannot be converted.
    """
    built = ARCHITECTURES[architecture]
    head, options = head or built.head, built.options | options
    built.check(tensors, options)
    ours, official_names = rename(tensors, built.names)
    if EMBEDDING not in ours:
        raise ValueError(f"The checkpoint must hold a whole model, got no {EMBEDDING}: layers alone are not a model")
    built.prepare(ours, options)
    kept = HEAD_MODULES[head]
    ours = {name: value for name, value in ours.items() if name.startswith(kept) or not name.startswith(ALL_HEADS)}
    config = build_config(ours, options, built, published_ski)
    warnings = warnings_of(config)
    arrange_operators(ours, config, options.get("num_heads") or options.get("encoder_attention_heads", 1))
    model = load(head, config, ours, official_names)
    report = {"architecture": architecture, "head": head, "options": options, "warnings": warnings}
    return model, report | {"tensors": destinations(tensors, official_names, ours, head)}


def load(head: str, config: TnnConfig, tensors: dict, official_names: dict):
    """A model with `tensors`, in their dtypes; ValueError if one is missing, left over or of another shape."""
    with torch.device("meta"):
        model = HEADS[head](config)
    counts = "num_batches_tracked"  # of batch norms
    floats = {name for name, one in tensors.items() if one.is_floating_point() and one.itemsize > 1}
    if wrong := [name for name in tensors if not (name in floats or name.endswith(counts))]:
        dtype = tensors[wrong[0]].dtype
        raise ValueError(f"The tensors must have floating-point numbers, got {dtype} for {official_names[wrong[0]]}")
    weights = {name_in_model(name, head): value.contiguous() for name, value in tensors.items()}
    official = {name_in_model(name, head): official for name, official in official_names.items()}
    if config.tie_word_embeddings and "lm_head.weight" in model.state_dict():
        weights["lm_head.weight"] = tensors[EMBEDDING]
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        found = re.sub(r"[\w.]*\w", lambda name: official.get(name[0], name[0]), " ".join(str(error).split()))
        raise ValueError(
            f"The checkpoint does not fit the architecture and its options. {found} "
            "The options norm_type, use_norm and tno_type, the position of the norm, and the head change names and "
            "shapes."
        ) from error
    model.tie_weights()
    return model.eval()
