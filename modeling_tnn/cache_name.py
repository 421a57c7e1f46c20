"""The name of a cache among the arguments and outputs of models.

transformers 5.24 calls `cache` what was `past_key_values` before. In this package it is `past_key_values`. The models
take both names, whatever release is installed, and return the cache by the name of that release.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

NEW, OLD = "cache", "past_key_values"
CACHE = NEW if NEW in BaseModelOutputWithPast.__dataclass_fields__ else OLD


def with_cache_as(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which the cache has this `name`, one of the two.

    Raises:
        ValueError: both names are given.
    """
    other = OLD if name == NEW else NEW
    if other not in given:
        return given
    given = dict(given)
    cache = given.pop(other)
    if cache is None:
        return given
    if given.get(name) is not None:
        raise ValueError(f"`{NEW}` and `{OLD}` are two names of one argument. Give one of them.")
    return given | {name: cache}


def takes_cache(forward: Callable) -> Callable:
    """Let `forward`, which has an argument `past_key_values`, take it by the name `cache` too.

    The signature has both: `generate` refuses arguments that are not in it.

    Raises:
        ValueError: when called with both.
    """

    @wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **with_cache_as(OLD, kwargs))

    signature = inspect.signature(forward)
    if NEW not in signature.parameters:
        *parameters, rest = signature.parameters.values()
        cache = inspect.Parameter(NEW, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Cache | None)
        call.__signature__ = signature.replace(parameters=[*parameters, cache, rest])
    return call
