"""The order of the package: which file may import which. CONTRIBUTING.md states the rules."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from helpers import processes
from modeling_tnn.tno_auto import BUILT_IN, OPERATORS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "modeling_tnn"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
# What only the package has; checkpoints carry the other flat files.
OWN = {"__init__", "auto_classes", "presets"}
SHIPPED = {name for name in FILES if "." not in name} - OWN
# The sub-packages in their order: those that extend the models, then the library of the programs. Two of a line do not
# import each other.
ORDER = [
    {"kernels"},
    {"compile", "parallel", "tools"},
    {"data", "original", "plotting"},
    {"serving"},
    {"training"},
    {"benchmarks"},
]
LEVELS = {folder: level for level, folders in enumerate(ORDER) for folder in folders}


@functools.cache
def imports(name: str) -> set[str]:
    """The files of the package that a file imports, those inside functions included."""
    folder, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) + 1 - node.level], *filter(None, [node.module])]
            whole = {".".join([*base, alias.name]) for alias in node.names} & FILES.keys()
            found |= whole or {".".join(base) or "__init__"}
    return found


def floors(names: set[str]) -> dict[str, int]:
    """The floor of each file, above all that it imports."""
    found = {}
    while len(found) < len(names):
        ready = {name for name in names - found.keys() if imports(name) & names <= found.keys()}
        assert ready, f"imports in a circle: {sorted(names - found.keys())}"
        found |= dict.fromkeys(ready, len(set(found.values())))
    return found


def test_shipped_files_import_shipped_files():
    """transformers' loader of remote code follows `from .name import x` alone."""
    for name in SHIPPED:
        assert imports(name) <= SHIPPED, name


def test_sub_packages_import_the_core():
    floors(FILES.keys() - {"__init__"})
    for name in FILES.keys() - SHIPPED - {"__init__"}:
        folder = name.partition(".")[0]
        others = {other.partition(".")[0] for other in imports(name) if "." in other} - {folder}
        assert all(LEVELS[other] < LEVELS[folder] for other in others), name


def test_models_need_nothing_of_the_programs():
    """Who imports the package alone has not the libraries of its extras."""
    code = "import sys, modeling_tnn; modeling_tnn.TnnModel; assert 'tnn_programs.cli' not in sys.modules"
    processes.run([sys.executable, "-c", code], check=True)


def test_imports_are_relative():
    for name, path in FILES.items():
        assert imports(name) <= FILES.keys(), name
        assert not any(module.split(".")[0] == "modeling_tnn" for module in modules(path)), name


SCRIPTS = ROOT / "scripts"
PROGRAMS = {path.stem for path in SCRIPTS.glob("*.py")} - {"__init__"}


def modules(path: Path) -> set[str]:
    """The modules that a file imports when it runs, by their full names: `a.b.name` for `from a.b import name`."""
    found, tree = set(), ast.parse(path.read_text())
    typing = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in ast.walk(ast.Module([node for node in tree.body if node not in typing], [])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_programs():
    """Nothing imports one; all are programs."""
    for path in [*SCRIPTS.rglob("*.py"), *PACKAGE.rglob("*.py")]:
        names = modules(path)
        assert not any(name.startswith("tnn_programs") for name in names), path.name
        assert not {name.partition(".")[0] for name in names} & PROGRAMS, path.name
    for name in PROGRAMS:
        assert 'if __name__ == "__main__":\n    main()\n' in (SCRIPTS / f"{name}.py").read_text(), name


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
