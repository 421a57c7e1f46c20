"""The order of the package: which file may import which. CONTRIBUTING.md states it."""

import ast
import re
from pathlib import Path

from modeling_tnn.tno_auto import BUILT_IN, OPERATORS

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in (ROOT / "modeling_tnn").glob("*.py")}
# From the ground up: a file imports files of earlier lines alone.
FLOORS = [
    {"layer_types", "mixer_types"},
    {"numerics", "fallback", "hub", "history", "cache_name", "pipeline"},
    {"conversion", "deferred_logits", "fourier", "gating", "inputs", "linear", "loss_triton", "norms", "stacking"},
    {"padding", "rpe", "loss", "toeplitz_fused", "channels", "regional_compilation"},
    {"toeplitz_triton"},
    {"toeplitz_choice"},
    {"toeplitz_recorded"},
    {"toeplitz", "packing"},
    {"rational", "diagonal", "recurrence", "ski_released"},
    {"tno"},
    {"cache_tnn"},
    {"attention", "cache_checks"},
    {"static_cache", "cache_rows", "request"},
    {"batching"},
    {"companion"},
    {"tno_rpe", "tno_fd", "tno_ski", "tno_rtf", "tno_modal", "tno_explicit", "tno_2d"},
    {"tno_s4d", "state_space"},
    {"tno_auto", "stability", "tensor_parallel", "sequence_parallel"},
    {"gtu"},
    {"hyena", "s4"},
    {"configuration_tnn"},
    {"modeling_tnn", "presets", "auto_classes"},
    {"heads", "decoding_step"},
    {"__init__"},
]


def imports(name: str) -> set[str]:
    """The files of the package that a file imports, those inside functions included."""
    tree = ast.parse(FILES[name].read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}


def test_every_file_has_a_floor():
    assert sorted(name for floor in FLOORS for name in floor) == sorted(FILES)


def test_imports_go_down():
    below = set()
    for floor in FLOORS:
        for name in floor:
            assert imports(name) <= below, f"{name} imports {sorted(imports(name) - below)}"
        below |= floor


def test_imports_are_relative_and_flat():
    """transformers' loader of remote code follows `from .name import x` alone."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in FILES, (name, node.module)
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "modeling_tnn" for alias in node.names), name


def test_contributing_states_the_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for floor in FLOORS:
        assert any(all(f"`{name}`" in line for name in floor) for line in text.splitlines()), floor


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
