"""Releases: archives that one commit gives again, one version, a README whose links work elsewhere."""

import io
import re
import runpy
import tarfile
import time
from pathlib import Path

import pytest

from helpers.scripts import ROOT

REPOSITORY = "https://example.org/tnn"
LINKS, REPACK, RELEASE = (
    runpy.run_path(str(ROOT / path)) for path in ("docs/site/links.py", ".ci/repack.py", ".ci/release_check.py")
)


def test_links_of_the_readme():
    """All lead somewhere, and pictures to the picture itself."""
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", LINKS["absolute_links"](text, ROOT, REPOSITORY))
    assert all(target.startswith(("https://", "#")) for target in targets)
    paths = [target.removeprefix(REPOSITORY).partition("#")[0] for target in targets if target.startswith(REPOSITORY)]
    assert all((ROOT / path.split("/main/")[1]).exists() for path in paths)
    assert {Path(path).suffix for path in paths if path.startswith("/raw/")} == {".png"}


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
