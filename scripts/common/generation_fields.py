"""Checks of the options of `generate` by the kinds that transformers documents, before anything is loaded."""

import ast
import json
import math
import re
from functools import cache
from typing import Any

from tnn_scripts.common.declared import declared_class

# A kind in transformers' documentation -> its name in a message, and whether a value is of it.
KINDS = {
    "int": ("a whole number", lambda value: type(value) is int),
    "float": ("a number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("text", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "tuple": ("a list", lambda value: isinstance(value, list)),
    "dict": ("an object or a list", lambda value: isinstance(value, (dict, list))),
}
# Fields that the documentation of transformers leaves out.
UNDOCUMENTED = {
    "use_mtp": ["bool"], "low_memory": ["bool"], "penalty_alpha": ["float"], "diversity_penalty": ["float"],
    "num_beam_groups": ["int"], "prefill_chunk_size": ["int"], "dola_layers": ["str", "list"],
    "force_words_ids": ["list"],
}  # fmt: skip
# Limits of numbers -> the fields that have them.
LIMITS = (
    (
        "at least 1",
        lambda value: value >= 1,
        {"max_new_tokens", "max_length", "num_beams", "num_return_sequences", "num_beam_groups", "max_cache_len"}
        | {"num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"}
        | {"prefill_chunk_size"},
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        {"temperature", "top_k", "min_length", "min_new_tokens", "no_repeat_ngram_size"},
    ),
    ("above 0", lambda value: value > 0, {"repetition_penalty", "encoder_repetition_penalty", "max_time"}),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, {"top_p", "typical_p", "top_h"}),
    ("from 0 to 1", lambda value: 0 <= value <= 1, {"min_p", "assistant_confidence_threshold"}),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, {"epsilon_cutoff", "eta_cutoff"}),
)


@cache
def documented_kinds() -> dict[str, list[str]]:
    """The kinds of values that each field of GenerationConfig has, by its docstring."""
    text = ast.get_docstring(declared_class("transformers.generation.configuration_utils", "GenerationConfig"))
    kinds = dict(UNDOCUMENTED)
    for name, kind in re.findall(r"^\s*(\w+) *\((.*)\):?$", text, re.MULTILINE):
        outer = re.sub(r"(list|tuple|dict)[\[(].*", r"\1", kind.partition("*optional*")[0].partition("defaults to")[0])
        kinds[name] = [word for word in re.findall(r"\w+", outer) if word in KINDS]
    return kinds


def read_value(name: str, text: str) -> Any:
    """The value of a field of GenerationConfig: JSON, or text if the field has text.

    Raises:
        ValueError: it is of another kind, or a number out of its limits.
    """
    kinds = documented_kinds().get(name, [])
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    if "str" in kinds and not any(KINDS[kind][1](value) for kind in kinds):
        value = None if value is None else text  # such as a stop string that is a number
    if value is not None and kinds and not any(KINDS[kind][1](value) for kind in kinds):
        wanted = " or ".join(dict.fromkeys(KINDS[kind][0] for kind in kinds))
        raise ValueError(f"--{name} must be {wanted}, or null, got {text}")
    if name.endswith(("_id", "_ids", "_tokens")) and not all(type(one) is int for one in _leaves(value)):
        raise ValueError(f"--{name} must have whole numbers, got {text}")
    for limits, holds, names in LIMITS:
        if name in names and type(value) in (int, float) and not holds(value):
            raise ValueError(f"--{name} must be {limits}, got {text}")
    return float(value) if kinds == ["float"] and type(value) is int else value  # transformers takes no other


def _leaves(value: Any) -> list:
    """What lists have, and lists in them."""
    return [leaf for part in value for leaf in (_leaves(part) or [part])] if isinstance(value, list) else []
