"""The fields of transformers' GenerationConfig as options, checked before anything is loaded."""

import argparse
import ast
import json
import re
from functools import cache
from typing import Any

from tnn_programs.cli.declared import declared_class, generation_fields
from tnn_programs.cli.model_path import nearest
from tnn_programs.cli.sampling import check_sampling
from tnn_programs.cli.text_files import check_text

# Fields after which `generate` returns something else than tokens, or is part of another one.
OTHER_OUTPUTS = ("return_dict_in_generate", "is_assistant")
# A kind in transformers' documentation -> the types that JSON has for it, and its name in a message.
KINDS = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "list": ((list,), "a list"),
    "tuple": ((list,), "a list"),
    "dict": ((dict, list), "an object or a list"),
}


def read_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """The `--name value` pairs for fields of GenerationConfig; ValueError for values that contradict each other."""
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
    """The value of a field of GenerationConfig, from JSON or text; ValueError if it is of another kind."""
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    kinds = documented_kinds().get(name, [])
    if is_of_kind(name, value):
        return float(value) if kinds == ["float"] and value is not None else value  # transformers takes no int
    if "str" in kinds:
        return text  # such as a stop string that is a number
    raise ValueError(f"--{name} must be {wanted(name)}, or null, got {text}")


def is_of_kind(name: str, value: Any) -> bool:
    """Whether a value from JSON is of a kind that a field of GenerationConfig has, or nothing is known of it."""
    kinds = documented_kinds().get(name, [])
    return value is None or not kinds or type(value) in {one for kind in kinds for one in KINDS[kind][0]}


def wanted(name: str) -> str:
    """The kinds of values of a field, for a message."""
    return " or ".join(dict.fromkeys(KINDS[kind][1] for kind in documented_kinds()[name]))


@cache
def documented_kinds() -> dict[str, list[str]]:
    """The kinds of values that each field of GenerationConfig has, by its docstring."""
    text = ast.get_docstring(declared_class("transformers.generation.configuration_utils", "GenerationConfig"))
    kinds = {}
    for name, kind in re.findall(r"^\s*(\w+) *\((.*)\):?$", text, re.MULTILINE):
        outer = re.sub(r"(list|tuple|dict)[\[(].*", r"\1", kind.partition("*optional*")[0].partition("defaults to")[0])
        kinds[name] = [word for word in re.findall(r"\w+", outer) if word in KINDS]
    return kinds
