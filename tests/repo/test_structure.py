"""The order of the package: which file may import which. CONTRIBUTING.md states the rules."""

import ast
import re
from pathlib import Path

from modeling_tnn.tno_auto import BUILT_IN, OPERATORS

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in (ROOT / "modeling_tnn").glob("*.py")}


def imports(name: str) -> set[str]:
    """The files of the package that a file imports, those inside functions included."""
    tree = ast.parse(FILES[name].read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}


def test_imports_go_down():
    """No file imports one that imports it, through others or inside functions."""
    floors = {}
    while len(floors) < len(FILES):
        ready = {name for name in FILES if name not in floors and imports(name) <= floors.keys()}
        assert ready, f"imports in a circle: {sorted(FILES.keys() - floors.keys())}"
        floors |= dict.fromkeys(ready, len(set(floors.values())))


def test_imports_are_relative_and_flat():
    """transformers' loader of remote code follows `from .name import x` alone."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in FILES, (name, node.module)
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "modeling_tnn" for alias in node.names), name


SCRIPTS = ROOT / "scripts"
PROGRAMS = {path.stem for path in SCRIPTS.glob("*.py")} - {"__init__"}
ROOMS = {path.parent.name for path in SCRIPTS.glob("*/__init__.py")}


def script_imports(path: Path) -> set[str]:
    """The modules of `scripts/` that a file of it imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tnn_scripts":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_program_imports_a_program():
    for path in SCRIPTS.rglob("*.py"):
        rooms = {name.split(".")[1] for name in script_imports(path)}
        assert rooms <= ROOMS, f"{path.name} imports {sorted(rooms - ROOMS)}"


def test_every_program_is_one():
    for name in PROGRAMS:
        assert 'if __name__ == "__main__":\n    main()\n' in (SCRIPTS / f"{name}.py").read_text(), name


def test_scripts_are_imported_by_their_full_names():
    bare = PROGRAMS | ROOMS | {path.stem for path in SCRIPTS.glob("*/*.py")}
    for path in SCRIPTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not set(names) & (bare - STANDARD), f"{path.name}: {names}"


# Modules of Python that are called as one of ours.
STANDARD = {"statistics"}


def test_no_test_module_imports_another():
    """Code that several tests need is in `tests/helpers/`."""
    tests = {path.stem for path in (ROOT / "tests").glob("*/test_*.py")} | {"conftest"}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else getattr(node, "names", [])
            names = [name if isinstance(name, str) else getattr(name, "name", None) for name in names]
            assert not {name.split(".")[-1] for name in names if name} & tests, path.name


def test_the_readme_lists_the_operators():
    """With the directions that they have."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (yes|no) \| (yes|no) \|", text, flags=re.MULTILINE)
    for name, *directions in rows:
        cls = OPERATORS[name]
        has = (cls.supports_causal, cls.supports_bidirectional)
        assert directions == ["yes" if one else "no" for one in has], name
    assert rows and all(f"`{name}`" in text for name in BUILT_IN)
