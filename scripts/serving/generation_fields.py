"""The fields of transformers' GenerationConfig as options, checked before anything is loaded."""

import argparse
import ast
import json
import re
from functools import cache
from typing import Any

from tnn_scripts.common.declared import declared_class, generation_fields
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.sampling import check_sampling
from tnn_scripts.common.terminal import check_text

# Fields after which `generate` returns something else than tokens, or is part of another one.
OTHER_OUTPUTS = ("return_dict_in_generate", "is_assistant")
# A kind in transformers' documentation -> its name in a message, and its types.
KINDS = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("text", (str,)),
    "list": ("a list", (list,)),
    "tuple": ("a list", (list,)),
    "dict": ("an object or a list", (dict, list)),
}
# Fields that the documentation of transformers leaves out.
UNDOCUMENTED = {
    "use_mtp": ["bool"], "low_memory": ["bool"], "penalty_alpha": ["float"], "diversity_penalty": ["float"],
    "num_beam_groups": ["int"], "prefill_chunk_size": ["int"], "dola_layers": ["str", "list"],
    "force_words_ids": ["list"],
}  # fmt: skip


def read_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """The `--name value` pairs for fields of GenerationConfig. A value is read as JSON if it is JSON.

    Raises:
        ValueError: a value is of another kind than its field, or contradicts another one.
    """
    fields = generation_fields()
    options = {}
    rest = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(rest[::2], rest[1::2] + [None] * (len(rest) % 2), strict=True):
        field = name.removeprefix("--")
        if field in OTHER_OUTPUTS:
            parser.error(f"{name} must not be given: this program writes text")
        if not name.startswith("--") or field not in fields or value is None:
            hint = nearest(field, fields, "--")
            given = f"{name} {value or '(no value)'}"
            parser.error(f"options must be those of this program or GenerationConfig, got {given}{hint}")
        check_text(name, value)
        options[field] = read_value(field, value)
    check_sampling(options)
    return options


def read_value(name: str, text: str) -> Any:
    """The value of a field of GenerationConfig: JSON, or text if the field has text.

    Raises:
        ValueError: it is of another kind.
    """
    kinds = documented_kinds().get(name, [])
    types = {one for kind in kinds for one in KINDS[kind][1]}
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    if value is None or not kinds or type(value) in types:
        return float(value) if kinds == ["float"] and value is not None else value  # transformers takes no int
    if str in types:
        return text  # such as a stop string that is a number
    wanted = " or ".join(dict.fromkeys(KINDS[kind][0] for kind in kinds))
    raise ValueError(f"--{name} must be {wanted}, or null, got {text}")


@cache
def documented_kinds() -> dict[str, list[str]]:
    """The kinds of values that each field of GenerationConfig has, by its docstring."""
    text = ast.get_docstring(declared_class("transformers.generation.configuration_utils", "GenerationConfig"))
    kinds = dict(UNDOCUMENTED)
    for name, kind in re.findall(r"^\s*(\w+) *\((.*)\):?$", text, re.MULTILINE):
        outer = re.sub(r"(list|tuple|dict)[\[(].*", r"\1", kind.partition("*optional*")[0].partition("defaults to")[0])
        kinds[name] = [word for word in re.findall(r"\w+", outer) if word in KINDS]
    return kinds
