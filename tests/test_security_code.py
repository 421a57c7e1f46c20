"""What our code does not do: read pickles, run texts as code, start shells; and what `make audit` makes of answers."""

import argparse
import ast
import json
import re
import shutil
import sys

import audit
import pytest
import torch
from test_convert_original import Malicious
from training_scripts import ROOT, run_script, write_config, write_text

from checkpoints import write_checksums  # isort: skip

SOURCES = sorted([*ROOT.glob("modeling_tnn/*.py"), *ROOT.glob("scripts/*.py")])
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty", "code"}
# The type of an error is all that is used of it.
PICKLE_ERROR = "pickle.UnpicklingError"
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "breakpoint", "input", "os.system", "os.popen", "os.startfile",
    "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "yaml.unsafe_load_all", "torch.serialization.add_safe_globals", "pandas.read_pickle",
    "numpy.load", "torch.hub.load", "torch.jit.load", "tempfile.mktemp",
}  # fmt: skip
UNSAFE_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")
# Keywords that must not have this value, wherever they stand.
UNSAFE_KEYWORDS = {
    ("shell", "True"), ("allow_pickle", "True"), ("weights_only", "False"), ("trust_remote_code", "True"),
    ("safe_serialization", "False"), ("verify", "False"),
}  # fmt: skip


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, aliases resolved."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unsafe_things(source: str) -> list[str]:
    """The calls, imports and keywords of a source that could run what a file says."""
    tree, found = ast.parse(source), []
    names = imported_names(tree)
    for module in {name.partition(".")[0] for name in names.values()} & UNSAFE_MODULES:
        uses = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used = {use for use in uses if use.startswith(f"{module}.")}
        if module != "pickle" or used != {PICKLE_ERROR}:
            found.append(f"import {module}")
    for node in ast.walk(tree):
        # Also without a call: `run = eval`.
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, dot, rest = ast.unparse(node).partition(".")
            name = names.get(first, first) + dot + rest
            if name in UNSAFE_CALLS or name.startswith(UNSAFE_PREFIXES):
                found.append(name)
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            found += [f"{key}={value}" for key, value in keywords.items() if (key, value) in UNSAFE_KEYWORDS]
            first, dot, rest = ast.unparse(node.func).partition(".")
            if names.get(first, first) + dot + rest == "torch.load" and keywords.get("weights_only") != "True":
                found.append("torch.load")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_sources(path):
    assert not unsafe_things(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)", "from pickle import loads", "import pickle as p\np.load(f)", "import joblib",
        "import marshal", "eval('1')", "run = eval", "exec(text)", "compile(text, '', 'exec')", "__import__(name)",
        "import os\nos.system('x')", "from os import system\nsystem('x')", "import os as o\no.execv('x', [])",
        "import subprocess\nsubprocess.run('x', shell=True)", "import yaml\nyaml.load(f, Loader)",
        "from yaml import unsafe_load as load\nload(f)", "import torch\ntorch.load(f)", "import torch as t\nt.load(f)",
        "import torch\ntorch.load(f, weights_only=False)", "from torch import load\nload(f)",
        "import numpy as np\nnp.load(f)", "read(f, allow_pickle=True)", "load(name, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_check_sees(source):
    assert unsafe_things(source)


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.load(f, weights_only=True)", "model.eval()", "import re\nre.compile('x')",
     "import yaml\nyaml.safe_load(f)", "import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass"],
)  # fmt: skip
def test_the_check_lets_pass(source):
    assert not unsafe_things(source)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with a checkpoint, and its options."""
    folder = tmp_path_factory.mktemp("run")
    options = ["--config", write_config(folder / "config"), "--train_file", write_text(folder / "text.txt"),
               "--max_steps", 4, "--checkpointing_steps", 2, "--output_dir", folder / "out"]  # fmt: skip
    run_script("pretrain", *options)
    return folder / "out", options


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_pickles_of_a_checkpoint_run_nothing(name, run_folder, tmp_path):
    """A checkpoint from elsewhere, whose checksums fit: of its states only tensors and plain values are read."""
    out, options = run_folder
    shutil.copytree(out / "checkpoint-2", tmp_path / "checkpoint-2")
    victim = tmp_path / "executed"
    torch.save({"state": Malicious(victim)}, tmp_path / "checkpoint-2" / name)
    write_checksums(tmp_path / "checkpoint-2")
    with pytest.raises(SystemExit, match="checkpoint-2 cannot be read: "):
        run_script("pretrain", *options, "--output_dir", tmp_path, "--resume_from_checkpoint", "latest")
    assert not victim.exists()


PACKAGES = [
    {"name": "good", "version": "1.0", "vulns": []},
    {"name": "bad", "version": "0.1", "vulns": [{"id": "CVE-1", "fix_versions": ["0.2"]}]},
    {"name": "unknown", "skip_reason": "Dependency not found on PyPI"},
]


@pytest.mark.parametrize(
    "packages, expected, status, strict_status",
    [
        (PACKAGES, "bad 0.1: CVE-1, fixed in 0.2\nNot audited, .*: unknown\n1 of 2 audited", 1, 1),
        (PACKAGES[:1], "^0 of 1 audited packages have known vulnerabilities; 0 not audited", 0, 0),
        (PACKAGES[2:], "Not audited, .*: unknown\n0 of 0 audited", 0, 2),
        ([], "^Nothing was audited: ConnectionError", 0, 2),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_audit(packages, expected, status, strict_status, strict, monkeypatch, capsys):
    """What pip-audit calls no known vulnerabilities, since it knows nothing, is not called so here."""
    output = json.dumps({"dependencies": packages}) if packages else ""
    answer = argparse.Namespace(stdout=output, stderr="Traceback\nConnectionError: no network")
    monkeypatch.setattr("audit.subprocess.run", lambda *arguments, **options: answer)
    monkeypatch.setattr(sys, "argv", ["audit.py", *(["--strict"] if strict else [])])
    with pytest.raises(SystemExit) as left:
        audit.main()
    assert left.value.code == (strict_status if strict else status)
    assert re.search(expected, capsys.readouterr().out)
