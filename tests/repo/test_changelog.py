"""CHANGELOG.md in the form of Keep a Changelog, with a section for the version of the package and short entries."""

import re

import modeling_tnn
from helpers.scripts import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SUBJECTS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_the_changelog():
    """The newest section is the version of the package, dated once it is tagged; old option names stay documented."""
    names = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) (?:- \d{4}-\d\d-\d\d|\(unreleased\))", name)[1] for name in names]
    assert versions[0] == modeling_tnn.__version__ and "(unreleased)" not in "".join(names[1:])
    assert versions == sorted(set(versions), key=lambda version: [-int(part) for part in version.split(".")])
    assert set(re.findall(r"^### (.*)$", TEXT, re.MULTILINE)) <= SUBJECTS
    assert not re.findall(r"^- .*\n(?:  .*\n){2,}", TEXT, re.MULTILINE), "entries of more than two lines"
