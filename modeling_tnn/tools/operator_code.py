"""The code of a user's operator, as a saved folder carries it: imports from the package become relative.

transformers copies what `from .name import ...` names, and in a folder all files of the models are beside each other.
"""

import re
from importlib import import_module
from pathlib import Path

from ..extensions import extensions

PACKAGE = __name__.partition(".")[0]
IMPORT = re.compile(rf"^([ \t]*)from {PACKAGE}(\.[\w.]+)? import (\([^)]*\)|[^\n]+)", re.MULTILINE)


def operator_code(cls: type, file: Path, carried: set[Path]) -> bytes:
    """Return the code of the `file` of an operator, for a folder with the files `carried`.

    A ValueError if the file cannot be imported elsewhere: it is none, or the one that is run, or imports others.
    """
    if not file.is_file() or cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(f"{cls.__module__}.{cls.__qualname__} is not a class of a module with a file")
    names = {one.stem for one in carried}
    if file.stem in names:
        raise ValueError(f"{file} has the name of a file of the models")
    code = file.read_text(encoding="utf-8")
    modules = re.findall(r"^[ \t]*(?:from|import)[ \t]+(\.|\w+)", code, re.MULTILINE)
    beside = [name for name in modules if file.with_name(f"{name}.py").exists() or (file.parent / name).is_dir()]
    if wrong := {*beside} - {PACKAGE}:  # a dot is the folder of the file
        raise ValueError(f"{file} imports from files beside it ({', '.join(sorted(wrong))}), which are not copied")

    def relative(found: re.Match) -> str:
        indent, module, listed = found.groups()
        lines = []
        for name in filter(None, map(str.strip, re.sub(r"#.*|[()\n]", " ", listed).split(","))):
            where = module or getattr(getattr(import_module(PACKAGE), name.split()[0], None), "__module__", "")
            if where.removeprefix(PACKAGE).removeprefix(".") not in names:
                raise ValueError(f"{file} imports {name} of {PACKAGE}, which is in no file of a saved folder")
            lines.append(f"{indent}from {where.removeprefix(PACKAGE)} import {name}")
        return "\n".join(lines)

    code = IMPORT.sub(relative, code)
    if re.search(rf"^[ \t]*(from|import)[ \t]+{PACKAGE}\b", code, re.MULTILINE):
        raise ValueError(f"{file} imports {PACKAGE} as a whole, not from {PACKAGE}")
    return code.encode()


extensions.register(operator_code=operator_code)
