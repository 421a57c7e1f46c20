"""Names and fields that modules declare, read from their source, for libraries that take seconds to import.

A command line is checked with these before anything is imported. They follow the installed releases. Programs that
train with transformers' Trainer have the fields of its arguments as options.
"""

import ast
import dataclasses
from functools import cache
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, Literal

from tnn_programs.cli.errors import importing

from tnn_programs.cli.parser import field_default, parse_arguments

BUILT_IN = {kind.__name__: kind for kind in (bool, int, float, str)}


def module_file(name: str) -> Path:
    """The file of a module, which is not imported."""
    package, *parts = name.split(".")
    folder = Path(find_spec(package).submodule_search_locations[0])
    return folder.joinpath(*parts).with_suffix(".py") if parts else folder / "__init__.py"


@cache
def declared_class(module: str, name: str) -> ast.ClassDef | None:
    """The definition of a class that `module` has, or imports from a module of its own package."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.level and name in (alias.name for alias in node.names):
            package = module.rpartition(".")[0]
            return declared_class(resolve_name("." * node.level + node.module, package), name)
    return None


def enum_values(module: str, name: str) -> list[str]:
    """The values of an Enum of texts; none of another class."""
    body = getattr(declared_class(module, name), "body", [])
    values = [_literal(node.value) for node in body if isinstance(node, ast.Assign)]
    return [value for value in values if isinstance(value, str)]


def declared_keys(module: str, name: str) -> list[str]:
    """The keys of a dictionary that a module writes out, or the texts of a tuple."""
    for node in _tree(module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in (getattr(target, "id", None) for target in targets):
            written = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            return [key.value for key in written if key is not None]
    raise LookupError(f"{module} has no {name}")


def declared_text(module: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(_tree(module))


@cache
def generation_fields() -> list[str]:
    """The fields of transformers' GenerationConfig, which are the keywords that it takes."""
    found = declared_class("transformers.generation.configuration_utils", "GenerationConfig")
    start = next(node for node in found.body if getattr(node, "name", "") == "__init__")
    calls = [node for node in ast.walk(start) if isinstance(node, ast.Call) and node.args]
    return [call.args[0].value for call in calls if getattr(call.func, "attr", "") == "pop"]


@cache
def dataclass_like(module: str, name: str) -> type:
    """A dataclass with the fields of another: kinds that a command line can give, help texts, and plain defaults."""
    made = [
        (node.target.id, _kind(node.annotation, module), _field(node.value))
        for node in declared_class(module, name).body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    ]
    return dataclasses.make_dataclass(name, made, kw_only=True)


def changed(options: Any) -> dict:
    """The fields of a dataclass that have not their defaults."""
    values = {field: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {field.name: value for field, value in values.items() if value != field_default(field)}


def start(options: type, description: str, program: str, **defaults):
    """Read the command line of a program that trains, and call `run` of its module in `runs`.

    Args:
        options: a dataclass.
        defaults: those of `TrainingArguments` that are not transformers' (see `training_options`).
    """
    args, given = parse_arguments([options, training_options(**defaults)], description)
    with importing("training"):
        from transformers import TrainingArguments

        run = import_module(f"tnn_programs.training.{program}").run
    run(args, TrainingArguments(**defaults | changed(given)))


def training_options(**defaults) -> type:
    """A dataclass like transformers' `TrainingArguments`, whose fields are options of a program.

    Args:
        defaults: other defaults than transformers'; None for a field that is None unless it is given.
    """
    like = dataclass_like("transformers.training_args", "TrainingArguments")
    kinds = {one.name: one.type for one in dataclasses.fields(like)}
    changed = [(name, kinds[name] | None if value is None else kinds[name], dataclasses.field(default=value))
               for name, value in defaults.items()]  # fmt: skip
    return dataclasses.make_dataclass(like.__name__, changed, bases=(like,), kw_only=True)


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(module_file(module).read_text(encoding="utf-8"))


def _field(value: ast.expr) -> dataclasses.Field:
    """The field with the default and the metadata of `field(...)`, or with a default. What is computed is left out."""
    given = {part.arg: part.value for part in value.keywords} if isinstance(value, ast.Call) else {"default": value}
    default = _literal(given.get("default"))
    described = given.get("metadata", ast.Dict([], []))
    texts = zip(map(_literal, described.keys), map(_literal, described.values), strict=True)
    metadata = {name: text for name, text in texts if text is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _literal(node: ast.expr | None) -> Any:
    try:
        return node and ast.literal_eval(node)
    except ValueError:
        return None


def _kind(annotation: ast.expr, module: str) -> Any:
    """The type of an option as transformers chooses it, which has one of several that a field can have."""
    names = ast.unparse(annotation).split(" | ")
    kinds = [ast.parse(name, mode="eval").body for name in names]
    if len(kinds) == 1 or "None" not in names:
        return _plain(kinds[names[1:2] != ["str"] and len(kinds) > 1], module)
    if "bool" in names:
        return bool | None
    return _plain(kinds[names[1] != "None"], module) | None


def _plain(kind: ast.expr, module: str) -> Any:
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "list":
        return list[_plain(kind.slice, module)]
    name = ast.unparse(kind)
    values = [] if name in BUILT_IN else enum_values(module, name)
    return Literal[tuple(values)] if values else BUILT_IN.get(name, str)
