"""The fields of transformers' GenerationConfig as options, checked before anything is loaded."""

import argparse
import json
from typing import Any

from tnn_programs.cli.declared import DECLARED
from tnn_programs.cli.model_path import did_you_mean
from tnn_programs.cli.sampling import check_sampling
from tnn_programs.cli.text_files import check_text

# Fields after which `generate` returns something else than tokens, or is part of another one.
OTHER_OUTPUTS = ("return_dict_in_generate", "is_assistant")
# A kind in transformers' documentation -> the types that JSON has for it, and its name in a message.
OF_JSON = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "list": ((list,), "a list"),
    "tuple": ((list,), "a list"),
    "dict": ((dict, list), "an object or a list"),
}
# Field of GenerationConfig -> the kinds of its values; none are known of some.
FIELDS: dict[str, list[str]] = DECLARED["generation"]


def read_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """The `--name value` pairs for fields of GenerationConfig; ValueError for values that contradict each other."""
    options = {}
    rest = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(rest[::2], rest[1::2] + [None] * (len(rest) % 2), strict=True):
        field = name.removeprefix("--")
        if field in OTHER_OUTPUTS:
            parser.error(f"{name} must not be given: this program writes text")
        if not name.startswith("--") or field not in FIELDS or value is None:
            hint = did_you_mean(field, FIELDS, "--")
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
    kinds = FIELDS[name]
    if is_of_kind(name, value):
        return float(value) if kinds == ["float"] and value is not None else value  # transformers takes no int
    if "str" in kinds:
        return text  # such as a stop string that is a number
    raise ValueError(f"--{name} must be {wanted(name)}, or null, got {text}")


def is_of_kind(name: str, value: Any) -> bool:
    """Whether a value from JSON is of a kind that a field of GenerationConfig has, or nothing is known of it."""
    kinds = FIELDS.get(name, [])
    return value is None or not kinds or type(value) in {one for kind in kinds for one in OF_JSON[kind][0]}


def wanted(name: str) -> str:
    """The kinds of values of a field, for a message."""
    return " or ".join(dict.fromkeys(OF_JSON[kind][1] for kind in FIELDS[name]))
