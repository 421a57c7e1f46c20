"""Releases: archives that one commit gives again, a README whose links work elsewhere, the changelog.

And programs beside the package: notebooks, and the experiments for a GPU.
"""

import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

import modeling_tnn
from helpers import processes
from helpers.models import slow
from helpers.scripts import ROOT

REPOSITORY = "https://example.org/tnn"
LINKS, REPACK, RELEASE = (
    runpy.run_path(str(ROOT / path)) for path in ("docs/site/links.py", ".ci/repack.py", ".ci/release_check.py")
)


def test_links_of_the_readme():
    """All lead somewhere, and pictures to the picture itself."""
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", LINKS["absolute_links"](text, ROOT, REPOSITORY))
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", text)) >= 15
    assert all(target.startswith(("https://", "#")) for target in targets)
    paths = [target.removeprefix(REPOSITORY).partition("#")[0] for target in targets if target.startswith(REPOSITORY)]
    assert all((ROOT / path.split("/main/")[1]).exists() for path in paths)
    assert {Path(path).suffix for path in paths if path.startswith("/raw/")} == {".png"}


def test_links_out_of_a_folder():
    """Those within it, to nowhere, to the web and to a section stay."""
    for text in ("[a](docs/index.md)", "[a](nowhere.md) [b](https://x.org) [c](#d)"):
        assert LINKS["absolute_links"](text, ROOT, REPOSITORY, ROOT / "docs") == text
    changed = LINKS["absolute_links"]("[a](README.md#install)", ROOT, REPOSITORY, ROOT / "docs")
    assert changed == f"[a]({REPOSITORY}/blob/main/README.md#install)"


def test_the_citation_is_that_of_this_release():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == modeling_tnn.__version__ and cited["license"] == project["license"]
    assert (cited["authors"], cited["keywords"]) == (project["authors"], project["keywords"])
    assert cited["repository-code"] == project["urls"]["Repository"] and len(cited["references"]) == 3


def test_a_release_has_one_version(monkeypatch):
    check = RELEASE["check_version"]
    monkeypatch.setitem(check.__globals__, "archives", list)
    check(None)
    with pytest.raises(RuntimeError, match="the versions must be one, got .*'tag': '9.9.9'"):
        check("v9.9.9")


def archive(path: Path, names: list[str], content: bytes) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname = len(content), int(time.time()), path.name
            made.addfile(member, io.BytesIO(content))
    return path


def test_archives_are_the_same(tmp_path):
    """Whatever the order of the files, their owner and their time; other content is another archive."""
    first = archive(tmp_path / "one.tar.gz", ["b", "a"], b"x")
    second = archive(tmp_path / "two.tar.gz", ["a", "b"], b"x")
    other = archive(tmp_path / "three.tar.gz", ["a", "b"], b"y")
    assert first.read_bytes() != second.read_bytes()
    for made in (first, second, other):
        REPACK["repack"](made, 1_700_000_000)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    with tarfile.open(first) as again:
        assert [(m.name, m.mtime, again.extractfile(m).read()) for m in again] == [
            ("a", 1_700_000_000, b"x"), ("b", 1_700_000_000, b"x")]  # fmt: skip


CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SUBJECTS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_the_changelog():
    """The newest section is the version of the package, dated once it is tagged."""
    names = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) (?:- \d{4}-\d\d-\d\d|\(unreleased\))", name)[1] for name in names]
    assert versions[0] == modeling_tnn.__version__ and "(unreleased)" not in "".join(names[1:])
    assert versions == sorted(set(versions), key=lambda version: [-int(part) for part in version.split(".")])
    assert set(re.findall(r"^### (.*)$", CHANGES, re.MULTILINE)) <= SUBJECTS


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", slow(*NOTEBOOKS), ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    """The assertions of the notebook hold."""
    environment = os.environ | {"MAX_STEPS": "2", "MPLBACKEND": "Agg"}
    processes.run([sys.executable, notebook], check=True, cwd=tmp_path, env=environment)


PROGRAM = ROOT / "docs" / "research" / "gpu.py"


@pytest.mark.slow
def test_each_kind_runs_once(tmp_path):
    """What has figures is left out the second time."""
    rows = [" ".join(f"word{(17 * i + j) % 97}" for j in range(300)) for i in range(12)]
    for split in ("train", "validation"):
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    reviews = Dataset.from_dict({"text": rows, "label": [0, 1] * 6})
    for split in ("train", "test"):
        reviews.to_parquet(tmp_path / "lra" / "imdb" / f"{split}.parquet")
    (tmp_path / "lra" / "README.md").write_text("---\nconfigs:\n- {config_name: imdb, data_dir: imdb}\n---\n")
    names = ["lm-hybrid-1e-3", "lm-mamba2-1e-3", "copying-64", "fd-speed", "long-range"]
    names += ["state-size", "lra-listops", "lra-text"]
    options = ["--quick", "--minutes", 60, "--output_dir", tmp_path / "out", "--text", tmp_path]
    options += ["--lra", tmp_path / "lra", "--only", *names]
    for attempt in range(2):
        done = subprocess.run([sys.executable, PROGRAM, *map(str, options)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was there") == len(names) * attempt
    records = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names}
    assert all(records[name]["figures"]["steps"] == 2 for name in names[:2])
    assert records["copying-64"]["figures"]["rows"] and records["fd-speed"]["figures"]["rows"]
    assert records["fd-speed"]["quick"] and records["fd-speed"]["device"] == "cpu"
